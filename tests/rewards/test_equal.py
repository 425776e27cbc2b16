"""`answers_equal`: clear cases, independent oracles, hostile input, and the gold answers of two data sets."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import require

from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.extract import from_box, from_hashes
from whet.rewards.answers.numbers import parse_literal

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
GOLDEN = Path(__file__).parents[1] / "golden"

EQUAL = r"""
5  ==  5.0  ##  -5  ==  −5  ##  3.0  ==  3  ##  .5  ==  1/2  ##  \frac12  ==  0.50  ##  ½  ==  0.5
1 1/2  ==  1.5  ##  1½  ==  1.5  ##  1\frac{1}{2}  ==  3/2  ##  -1\frac{1}{2}  ==  -3/2  ##  1.5e3  ==  1500
1.5 \times 10^3  ==  1500  ##  1.5 \cdot 10^{3}  ==  1500  ##  10^{-3}  ==  0.001  ##  50%  ==  50
50\%  ==  0.5  ##  50%  ==  50\%  ##  28 percent  ==  28\%  ##  $1,234  ==  1234  ##  \$1,234.50  ==  1234.5
€5  ==  5  ##  5€  ==  5  ##  £20  ==  20  ##  1{,}234  ==  1234  ##  1\,234  ==  1234
1\!,234  ==  1234  ##  11,\! 111,\! 111,\! 100  ==  11111111100  ##  7,425,000  ==  7425000
1 000  ==  1000  ##  1000,99  ==  1000.99  ##  1,22  ==  1.22  ##  0,111  ==  0.111
\dfrac{1}{2}  ==  \tfrac12  ##  \frac{1}{2}  ==  1/2  ##  $5$  ==  5  ##  \(5\)  ==  5  ##  \[5\]  ==  5
$$5$$  ==  5  ##  \text{5}  ==  5  ##  \boxed{5}  ==  5  ##  \mathbf{5}  ==  5
\left( 3, \frac{\pi}{2} \right)  ==  (3, \pi/2)  ##  \left(3,\frac{\pi}{2}\right)  ==  (3,\frac{1}{2}\pi)
\displaystyle\frac12  ==  0.5  ##  \sqrt{4}  ==  2  ##  \sqrt[3]{8}  ==  2  ##  \sqrt[3]{-8}  ==  -2
\sqrt2  ==  \sqrt{2}  ##  \sqrt{8}  ==  2\sqrt{2}  ##  \frac{\sqrt{3}}{3}  ==  \frac{1}{\sqrt3}
90^\circ  ==  90  ##  90^{\circ}  ==  90°  ##  90 degrees  ==  90  ##  5 cm  ==  5  ##  5\text{ cm}  ==  5
5 cm  ==  5\text{ cm}  ##  12 dollars  ==  12  ##  12 dollars  ==  \$12
32 \text{ square cm}  ==  32\text{ cm}^2  ##  32\text{ cm}^2  ==  32  ##  32 cm^2  ==  32
20 m/s  ==  20  ##  60 miles per hour  ==  60  ##  60 mph  ==  60  ##  15 apples  ==  15  ##  x=5  ==  5
x = 5  ==  $5$  ##  f(x) = x^2  ==  x^2  ##  y = 2x+1  ==  2x+1=y  ##  y=2x+1  ==  y = 2x + 1
y=2x+1  ==  2x-y+1=0  ##  y=2x+1  ==  2x+1  ##  x=5  ==  x = 5  ##  {1,2}  ==  \{2,1\}
\{1, 2\}  ==  \{2, 1\}  ##  1,2  ==  2,1  ##  1, -2  ==  -2, 1  ##  [1,2)  ==  [1, 2)
(-\infty, 3]  ==  \left(-\infty,3\right]  ##  (1,2)\cup(3,4)  ==  (3,4) \cup (1,2)
[3,7] \cup [8,9)  ==  [8,9)\cup[3,7]  ##  (1,2,3)  ==  (1, 2, 3)
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}  ==  [[1,2],[3,4]]
\begin{pmatrix} 1 \\ 2 \\ 3\end{pmatrix}  ==  \begin{bmatrix}1\\2\\3\end{bmatrix}
\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}  ==  \begin{pmatrix} \frac12 \\ 2 \end{pmatrix}
\begin{pmatrix} -4 & 0 \\ 0 & -4 \end{pmatrix}  ==  \begin{bmatrix} -4 & 0 \\ 0 & -4 \end{bmatrix}
\left[\begin{array}{cc} 1 & 2 \\ 3 & 4\end{array}\right]  ==  \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
60 270 90 180  ==  60,270,90,180  ##  60, 270, 90, 180  ==  [60, 270, 90, 180]
[60, 270, 90, 180]  ==  60 270 90 180  ##  [60. 270. 90. 180.]  ==  60, 270, 90, 180
\begin{pmatrix}60\\270\\90\\180\end{pmatrix}  ==  [60, 270, 90, 180]
(60, 270, 90, 180)  ==  [60, 270, 90, 180]  ##  [[1 2] [3 4]]  ==  [[1,2],[3,4]]
1 \pm \sqrt{19}  ==  1+\sqrt{19}, 1-\sqrt{19}  ##  1 \pm \sqrt{19}  ==  1-\sqrt{19},1+\sqrt{19}
\pm 2  ==  2, -2  ##  x = \pm 2  ==  2, -2  ##  (B)  ==  B  ##  B.  ==  B  ##  B)  ==  B
\text{(B)}  ==  B  ##  \textbf{(B)}  ==  (B)  ##  \text{B}  ==  B  ##  b  ==  B  ##  \text{(E)},  ==  E
yes  ==  Yes  ##  Yes.  ==  yes  ##  TRUE  ==  true  ##  \text{Evelyn}  ==  evelyn
\text{Evelyn}  ==  Evelyn  ##  2x+4  ==  2(x+2)  ##  x^2+2x+1  ==  (x+1)^2  ##  (x+1)(x-1)  ==  x^2-1
\frac{x}{2}  ==  x/2  ##  \frac{1}{2}x  ==  \frac{x}{2}  ##  x^{2}y  ==  yx^2
\sin^2 x + \cos^2 x  ==  1  ##  \sin(2x)  ==  2\sin x\cos x  ##  \tan 15^\circ  ==  2-\sqrt3
\tan x  ==  tan(x)  ##  e^{x}e^{y}  ==  e^{x+y}  ##  \ln 4  ==  2\ln 2  ##  \log_2 8  ==  3
\log_{2} x  ==  \frac{\ln x}{\ln 2}  ##  i^2  ==  -1  ##  \frac{1}{4} - \frac{3}{7} i  ==  \frac{7-12i}{28}
3.14159  ==  \pi  ##  0.333333  ==  1/3  ##  0.\overline{3}  ==  1/3  ##  1.41421356  ==  \sqrt{2}
5!  ==  120  ##  \binom{5}{2}  ==  10  ##  |x|  ==  \sqrt{x^2}  ##  1121_4  ==  1121_{4}
\frac{14}{3}  ==  4\frac23  ##  2 \text{ and } 3  ==  2,3  ##  -2 \text{ or } -12  ==  -12, -2
x \in [-2,7]  ==  [-2,7]  ##  x>5  ==  5<x  ##  x > 5  ==  (5,\infty)  ##  -2 \le x \le 7  ==  [-2,7]
\$\dfrac23 \approx \$0.67  ==  \frac{2}{3}  ##  3 million  ==  3,000,000
\frac{1}{7}\triangle ABC  ==  \frac17\triangle ABC  ##  10,\!010  ==  10010  ##  p - q  ==  -q+p
\emptyset  ==  \varnothing  ##  \mathbb{R}  ==  (-\infty,\infty)
4\!:\!51\!:\!06 \text{ p.m.}  ==  4:51:06 p.m.  ##  \frac {1}{ 4027}  ==  \frac{1}{4027}
5^{th}  ==  5^{\text{th}}  ##  k = \frac{1}{3}  ==  1/3  ##  1/3  ==  \frac{1}{3} \text{meters}
(9+1)  ==  10  ##  \frac3{3}  ==  1  ##  14 {, }916  ==  14,916  ##  \{5\}  ==  5  ##  3\text{ cm}  ==  3 cm
x=1, x=2  ==  1,2  ##  x = 1 \text{ or } x = 2  ==  \{1,2\}  ##  -\frac{1}{3}  ==  \frac{-1}{3}
-\frac{1}{3}  ==  \frac{1}{-3}  ##  2^{10}  ==  1024  ##  +5  ==  5  ##  007  ==  7  ##  5 \text{ m}  ==  5
\text{5 cm}  ==  5  ##  5,\,-11  ==  -11, 5  ##  1,i,-i  ==  -i,1,i  ##  2 + 3i  ==  3i+2
3\sqrt{13}  ==  \sqrt{117}  ##  6.02 \times 10^{23}  ==  6.02e23  ##  100\%  ==  100
\frac{1}{2}\%  ==  0.5%  ##  (x, y) = (1, 2)  ==  (1,2)  ##  sqrt(2)/2  ==  \frac{\sqrt{2}}{2}
2**3  ==  8  ##  x^2 + y^2 = 4  ==  y^2+x^2=4  ##  3x-5y+17=0  ==  -3x+5y-17=0  ##  (3,-2)  ==  (3, -2)
\langle 1,2,3\rangle  ==  (1,2,3)  ##  5\text{m}  ==  5  ##  5\mathrm{cm}  ==  5
5\ \mathrm{cm}  ==  5 cm  ##  5\,\text{cm}^3  ==  5  ##  10\text{ m/s}  ==  10
10 \frac{\text{m}}{\text{s}}  ==  10 \frac{\text{m}}{\text{s}}  ##  $28$ %  ==  28\%
12 $ and $13  ==  12\text{ and }13  ##  the cat  ==  cat  ##  a dog  ==  dog
No solution  ==  \text{no solution}  ##  \mathrm{True}  ==  true  ##  6.0 \times 10^{-3}  ==  0.006
2.5e-3  ==  0.0025  ##  1,000,000  ==  10^6  ##  -1,234  ==  -1234  ##  \frac{-3}{4}  ==  -0.75
-\dfrac{3}{4}  ==  \frac{3}{-4}  ##  7\frac{3}{4}  ==  7 3/4  ##  7 3/4  ==  7.75
\frac{x+1}{2}  ==  0.5x+0.5  ##  (x-1)(x+2)  ==  x^2+x-2  ##  x(x+1)  ==  x^2 + x
\frac{1}{x+1}+\frac{1}{x-1}  ==  \frac{2x}{x^2-1}  ##  a^2-b^2  ==  (a-b)(a+b)  ##  -x+3  ==  3-x
\sqrt{12}+\sqrt{27}  ==  5\sqrt{3}  ##  \frac{\sqrt{6}-\sqrt{2}}{4}  ==  \sin 15^\circ
\cos\frac{\pi}{3}  ==  1/2  ##  \frac{2\pi}{3}  ==  2\pi/3  ##  2\pi  ==  6.283185307
4\pi  ==  4 \cdot \pi  ##  \pi r^2  ==  r^2\pi  ##  3x^{2}-2  ==  3x^2 - 2  ##  \log_{10} 100  ==  2
\log_2(8)  ==  3  ##  e^{\ln 5}  ==  5  ##  e^{i\pi}  ==  -1  ##  (2+3i)(2-3i)  ==  13  ##  |{-5}|  ==  5
\left|-5\right|  ==  5  ##  \lfloor 3.7 \rfloor  ==  \lfloor 3.7 \rfloor  ##  n!  ==  n!
\frac{n!}{2}  ==  \frac{n!}{2}  ##  C(5,2)  ==  C(5,2)  ##  \binom{n}{2}  ==  \binom{n}{2}
x_1 + x_2  ==  x_2+x_1  ##  x_{1}  ==  x_1  ##  \alpha+\beta  ==  \beta+\alpha
(-\infty,0)\cup(0,\infty)  ==  (-\infty, 0) \cup (0, +\infty)  ##  [0,\infty)  ==  x \ge 0
x\geq 0  ==  [0,\infty)  ##  2<x\leq 5  ==  (2,5]  ##  x<-1 \text{ or } x>1  ==  (-\infty,-1)\cup(1,\infty)
x \in (-\infty,-1)\cup(1,\infty)  ==  (-\infty,-1)\cup(1,\infty)  ##  (a,b)  ==  (a, b)
(1,2),(3,4)  ==  (3,4),(1,2)  ##  \{(1,2),(3,4)\}  ==  \{(3,4),(1,2)\}
(0.5, 0.25)  ==  \left(\frac{1}{2},\frac{1}{4}\right)  ##  3:4  ==  3 : 4  ##  A,B,E  ==  \text{A, B, E}
Alice and Bob  ==  Bob and Alice  ##  x=-1,3  ==  -1, 3  ##  x = 2, y = 3  ==  x=2,y=3
y = -2x + 5  ==  y=5-2x  ##  2x+3y=6  ==  6=3y+2x  ##  \frac{1}{2}, \frac{3}{4}  ==  0.75, 0.5
100,200,300  ==  [100,200,300]  ##  10,000 dollars  ==  \$10,000  ##  \$18.90  ==  18.9
$18.90  ==  \$18.9  ##  5 USD  ==  \$5  ##  0.1  ==  1/10  ##  1e3  ==  1,000  ##  33.33\%  ==  33.33
\dfrac{\pi}{4}  ==  \frac{\pi}{4}  ##  \tfrac{1}{3}  ==  \frac{1}{3}  ##  \frac{1}{3}  ==  0.3333333333
3.1415926535  ==  \pi  ##  x=\frac{1}{2}  ==  \frac12  ##  m\angle A = 30^\circ  ==  30
P(A) = \frac{1}{4}  ==  0.25  ##  \text{The answer is }5  ==  \text{the answer is } 5
(x+y)^2  ==  x^2+2xy+y^2  ##  \mathbf{i}+2\mathbf{j}  ==  i+2j  ##  2^{n+1}  ==  2\cdot2^n
\frac{a^3b^2}{ab}  ==  a^2 b  ##  \sqrt{x^2y}  ==  x\sqrt{y}  ##  \sqrt[4]{16}  ==  2  ##  27^{1/3}  ==  3
8^{2/3}  ==  4  ##  4^{-1/2}  ==  0.5  ##  \arctan 1  ==  \frac{\pi}{4}  ##  \sin^{-1} 1  ==  \pi/2
\begin{pmatrix}1&2\end{pmatrix}  ==  (1,2)
\begin{vmatrix}1&2\\3&4\end{vmatrix}  ==  \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
\left(\begin{array}{c}1\\2\end{array}\right)  ==  \begin{pmatrix}1\\2\end{pmatrix}
(1,2)^T  ==  \begin{pmatrix}1\\2\end{pmatrix}  ##  \boxed{\frac{1}{2}}  ==  0.5  ##  \fbox{7}  ==  7
1.0  ==  1  ##  1.  ==  1  ##  +\infty  ==  \infty  ##  "\text{Yes}"  ==  yes  ##  **42**  ==  42
`42`  ==  42  ##  42 .  ==  42  ##  \frac12\text{ hours}  ==  0.5  ##  2\sqrt{5} cm  ==  2\sqrt{5}
30 minutes  ==  30\text{ min}  ##  \$ 5  ==  5  ##  3 \frac{1}{2}  ==  3.5  ##  −\frac{1}{2}  ==  -0.5
x≥2  ==  [2,\infty)  ##  √2  ==  \sqrt{2}  ##  π/2  ==  \frac{\pi}{2}  ##  x²+1  ==  x^2+1
60°  ==  60^\circ  ##  1{,}234{,}567  ==  1234567  ##  (\frac{1}{2}, 3)  ==  (0.5,3)
\{ -1, 0, 1\}  ==  \{1,0,-1\}
"""

DIFFERENT = r"""
\boxed{0}\boxed{5} then \boxed{7}  !=  0  ##  \boxed{\boxed{0}\boxed{5}}  !=  0  ##  1,50  !=  1.05
2/3 \approx 0.9  !=  0.9  ##  (1,2\}  !=  (1,2)  ##  \{1,2)  !=  \{1,2\}
2.00  !=  \sqrt{4.000001}  ##  400+\frac{1}{2}  !=  400
5  !=  6  ##  5  !=  -5  ##  5 or 7  !=  5  ##  5 or 7  !=  7  ##  5,7  !=  5
\boxed{5},\boxed{7}  !=  5  ##  \boxed{5,5}  !=  5  ##  5,5  !=  5  ##  1,1,1,1  !=  1  ##  1,2,3  !=  123
12,34  !=  1234  ##  nan  !=  5  ##  inf  !=  5  ##  nan  !=  0  ##  1_0  !=  10
600  !=  60 270 90 180  ##  600  !=  [60, 270, 90, 180]  ##  [180, 90, 270, 60]  !=  60 270 90 180
60 270 90  !=  60 270 90 180  ##  10^{10^{10}}  !=  5  ##  9^{9^{9^9}}  !=  1  ##  100000000!  !=  1
(x+1)^{100000}  !=  x  ##  0.28  !=  28  ##  28/100  !=  28  ##  \frac{28}{100}  !=  28  ##  3.14  !=  \pi
0.33  !=  1/3  ##  0.333  !=  1/3  ##  [0,9)  !=  [0,1)  ##  (0,9)  !=  [0,9)  ##  1  !=  -[0,1)
(1,2)  !=  [1,2]  ##  (1,2)  !=  (2,1)  ##  \{1,2\}  !=  \{1,3\}  ##  \{1,2\}  !=  \{1,2,3\}
1,1,2  !=  1,2  ##  1,1,2  !=  1,2,2  ##  1 or 1 or 2  !=  1 or 2 or 2
1/2  !=  2/1  ##  x^2  !=  x^3  ##  2x  !=  3x  ##  x+1  !=  x-1
\sqrt{2}  !=  \sqrt{3}  ##  A  !=  B  ##  (A)  !=  (B)  ##  B) 5  !=  5  ##  yes  !=  no  ##  5 cm  !=  5 kg
x=5  !=  x=6  ##  x=5  !=  6  ##  y=2x+1  !=  y=2x-1  ##  5=7  !=  5  ##  5=7  !=  7  ##  2x+z-5=0  !=  0
10^{20}\sqrt{2}-10^{20}\sqrt{2}  !=  5  ##  |x|  !=  x  ##  50%  !=  5  ##  \frac{1}{12}  !=  \frac{11}{2}
cat  !=  act  ##  Evelyn  !=  Carla  ##  not 5  !=  5  ##  1121_4  !=  1121  ##  12  !=  1,2
3.0000001  !=  3  ##  2+10^{-12}  !=  2  ##  5 million  !=  5  ##  (2,3)  !=  2,3,4
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}  !=  \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
(1,2)\cup(3,4)  !=  (1,2)  ##  1/0  !=  1/0+1  ##  1\frac{1}{2}  !=  1/2  ##  -\frac{1}{2}  !=  \frac12
1000001  !=  1000000  ##  \infty  !=  -\infty  ##  2\sqrt{3}  !=  3\sqrt{2}  ##  x \in [-2,7]  !=  (-2,7)
x>5  !=  x<5  ##  1 2  !=  12  ##  two  !=  2 3  ##  e  !=  2.72  ##  1e5  !=  1e6  ##  5 6  !=  30
C(5,2)  !=  C(5,3)  ##  \lfloor 3.7 \rfloor  !=  \lfloor 4.1 \rfloor
\begin{vmatrix}1&2\\3&4\end{vmatrix}  !=  \begin{vmatrix} 1 & 2 \\ 3 & 5 \end{vmatrix}
100,200,300  !=  100  ##  5 0  !=  50  ##  5$7  !=  57  ##  (1,2)^T  !=  (2,1)  ##  x_1  !=  x_2
3:4  !=  4:3  ##  n!  !=  n  ##  x=-1,3  !=  -1  ##  \sin 1  !=  \sin 1^\circ  ##  x^{10}  !=  x^1 0
1/3  !=  0.333  ##  2.0000001  !=  2  ##  180  !=  \pi  ##  \frac{1}{2}\%  !=  1/2+1  ##  20%  !=  20 days
20%  !=  2  ##  (2,5]  !=  [2,5)  ##  2<x\leq 5  !=  (2,5)  ##  A,B  !=  A  ##  Alice and Bob  !=  Alice
True  !=  False  ##  5 7/8  !=  5  ##  \log 10  !=  10  ##  -\infty  !=  \infty
10.5 hours  !=  10.5 minutes  ##  a  !=  b  ##  ab  !=  a+b  ##  5 \text{ or } 5  !=  5  ##  5 and 5  !=  5
{5}, {7}  !=  5  ##  <answer>5</answer>  !=  7  ##  5;7  !=  5
12345678901234567890  !=  12345678901234567891  ##  0.1  !=  0.10000001
[60,270,90]  !=  [60,270,90,180]
"""

VECTORS = [
    "60 270 90 180",
    "60, 270, 90, 180",
    "60,270,90,180",
    "60\n270\n90\n180",
    "60,\n270,\n90,\n180",
    "[60, 270, 90, 180]",
    "[60 270 90 180]",
    "[60. 270. 90. 180.]",
    "(60, 270, 90, 180)",
    r"\begin{pmatrix}60\\270\\90\\180\end{pmatrix}",
    r"$\left[60, 270, 90, 180\right]$",
    r"\langle 60.0, 270, 90, 180 \rangle",
]
# fmt: off
NOT_THE_VECTOR = [
    "600", "60", "60 270 90", "60 270 90 181", "270 60 90 180", "[60, 270, 90, 180, 0]", "6027090180",
    "60+270+90+180",
]
# fmt: on

HOSTILE = {
    "tower": "10^{10^{10}}",
    "nines": "9^{9^{9^{9^9}}}",
    "factorial": "100000000!",
    "power": "(x+1)^{100000}",
    "large power": "3^{100000000}",
    "parentheses": "(" * 3000 + "1" + ")" * 3000,
    "few parentheses": "(" * 400 + "1" + ")" * 400,
    "braces": "{" * 3900,
    "roots": r"\sqrt{" * 400 + "2" + "}" * 400,
    "fractions": r"\frac{1}{" * 200 + "1" + "}" * 200,
    "sum": "+".join(f"1/{i}" for i in range(2, 180)),
    "exponents": "2^" * 400 + "2",
    "bangs": "5" + "!" * 900,
    "digits": "9" * 5000,
    "ones": "1,1," * 900 + "1",
    "huge exponent": "1e999999",
    "roots of many": ",".join(f"x+{i}" for i in range(40)),
    "signs": r"1\pm" * 500,
    "text": r"\text{" * 600,
    "matrix": r"\begin{pmatrix}" + "1&" * 1500 + r"\end{pmatrix}",
    "equations": "x=1=" * 400,
    "spaces": " " * 100_000 + "1 " * 1900,
    "words": "a " * 1900,
    "long": r"\frac{1}{2}" * 20_000,
    "controls": "\x00\ud800\u200b\\" * 500,
    "binomial": r"\binom{1000000000}{500000000}",
}


def rows(table: str, sign: str) -> list[tuple[str, str]]:
    """Cut a table into (left, right) pairs."""
    cells = [cell for line in table.strip().splitlines() for cell in line.split("  ##  ")]
    return [(left, right) for left, _, right in (cell.partition(f"  {sign}  ") for cell in cells)]


@pytest.mark.parametrize(("left", "right"), rows(EQUAL, "=="))
def test_clear_cases_are_equal_in_both_directions(left: str, right: str) -> None:
    assert answers_equal(left, right)
    assert answers_equal(right, left)


@pytest.mark.parametrize(("left", "right"), rows(DIFFERENT, "!="))
def test_clear_cases_differ_in_both_directions(left: str, right: str) -> None:
    assert not answers_equal(left, right)
    assert not answers_equal(right, left)


@pytest.mark.parametrize("gold", ["5", "0", r"\frac{1}{2}", "x+1", "(1,2)", "A", "yes", "", r"\text{cm}"])
@pytest.mark.parametrize("empty", ["", "   ", "\n", "$", "$$", r"\,", "\u200b", ".", "nan", "inf", "None"])
def test_empty_and_non_answers_earn_nothing(empty: str, gold: str) -> None:
    assert not answers_equal(empty, gold)


def test_every_layout_of_a_vector_is_accepted_and_no_other_value() -> None:
    for gold in VECTORS:
        for layout in VECTORS:
            assert answers_equal(layout, gold), (layout, gold)
            assert answers_equal(layout, gold, ordered=True), (layout, gold)
        for wrong in NOT_THE_VECTOR:
            assert not answers_equal(wrong, gold, ordered=True), (wrong, gold)


def test_order_of_bare_lists_is_free_unless_the_caller_asks_for_it() -> None:
    assert answers_equal("270, 60", "60, 270")
    assert not answers_equal("270, 60", "60, 270", ordered=True)
    assert not answers_equal("[270, 60]", "60, 270")


@pytest.mark.parametrize(
    "text", ["408", "408.0", "$408$", "408 apples", "\\frac{816}{2}", "407 3/3", "816/2", "PLN 408", "₪408"]
)
def test_a_plain_number_is_a_written_number(text: str) -> None:
    assert answers_equal(text, "408", plain_number=True) == (text != "407 3/3")


@pytest.mark.parametrize(
    "text",
    [
        "17*24",
        "17 \\times 24",
        "400+8",
        "407+\\frac{2}{2}",
        "(409-1)",
        "408^1",
        "\\sqrt{166464}",
        "17*24=408",
    ],
)
def test_copying_the_question_does_not_pay_where_a_plain_number_is_asked(text: str) -> None:
    assert answers_equal(text, "408")
    assert not answers_equal(text, "408", plain_number=True)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_wrong_at_once(name: str) -> None:
    text = HOSTILE[name]
    golds = ["5", r"\frac{1}{3}", r"\sqrt{2}", "x+1", "(1,2)", "A", text[::-1] + "x"]
    start = time.process_time()
    assert not any(answers_equal(text, gold) for gold in golds)
    assert not any(answers_equal(gold, text) for gold in golds)
    assert answers_equal(text, text)
    assert (time.process_time() - start) / (
        2 * len(golds) + 1
    ) < 0.1  # measured at most 0.015 s on a slow core


@given(st.text(max_size=60), st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_is_judged_without_raising(left: str, right: str) -> None:
    assert answers_equal(left, right) == answers_equal(right, left)
    assert answers_equal(left, left) == (bool(left.strip()))


# fmt: off
PIECES = [
    "\\frac", "{", "}", "1", "23", ",", " ", "(", ")", "[", "]", "^", "_", "x", "\\sqrt", "\\pm", "=",
    "<", "\\cup", "-", "+", "/", "%", "\\text{", "cm", "or", "\\{", "\\}", "!", "|", "\\begin{pmatrix}",
    "\\end{pmatrix}", "&", "\\\\", "\\overline", ".", "\\log", "°", "\\sin", "\\binom", "\\approx",
    "\\in", "\\infty", "$", "\\boxed", "\n", "e", "i",
]
# fmt: on


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.sampled_from(PIECES), max_size=14))
@settings(max_examples=400, deadline=None)
def test_any_latex_is_judged_without_raising_and_symmetrically(left: list[str], right: list[str]) -> None:
    a, b = "".join(left), "".join(right)
    assert answers_equal(a, b) == answers_equal(b, a)


@given(st.fractions(max_denominator=999), st.fractions(max_denominator=999))
@settings(max_examples=150, deadline=None)
def test_fractions_agree_with_exact_arithmetic_in_every_spelling(left: Fraction, right: Fraction) -> None:
    sign = "-" if left < 0 else ""
    top, bottom = abs(left.numerator), left.denominator
    other = f"{right.numerator}/{right.denominator}"
    for spelling in (
        f"{sign}{top}/{bottom}",
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"\dfrac{{{sign}{top * 3}}}{{{bottom * 3}}}",
    ):
        assert answers_equal(spelling, other) == (left == right)
        assert answers_equal(other, spelling) == (left == right)
        assert answers_equal(spelling, str(left))


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
@settings(max_examples=150, deadline=None)
def test_decimals_agree_with_exact_arithmetic(value) -> None:
    exact = Fraction(value)
    assert answers_equal(str(value), f"{exact.numerator}/{exact.denominator}")
    assert answers_equal(f"{value:,}", f"${value}$")
    assert not answers_equal(str(value), str(value + 1))
    literal = parse_literal(f"{value:f}")
    assert literal is not None
    assert literal.value == exact


def _polynomial(coefficients: list[int]) -> str:
    return "+".join(f"({c})x^{{{power}}}" for power, c in enumerate(coefficients))


@given(
    st.lists(st.integers(-9, 9), min_size=1, max_size=4), st.lists(st.integers(-9, 9), min_size=1, max_size=4)
)
@settings(max_examples=100, deadline=None)
def test_products_of_polynomials_equal_their_expansion_and_nothing_else(
    left: list[int], right: list[int]
) -> None:
    product = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            product[i + j] += a * b
    factored = f"({_polynomial(left)})({_polynomial(right)})"
    assert answers_equal(factored, _polynomial(product))
    product[-1] += 1
    assert not answers_equal(factored, _polynomial(product))


def _lines(path: Path) -> list[dict[str, str]]:
    if path.is_relative_to(SHARED):
        require(str(path.relative_to(SHARED.parents[1])))
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("folder", "count"), [(GOLDEN, 10), (SHARED, 7473)], ids=["golden", "all"])
def test_every_gold_answer_of_gsm8k_is_found_and_equals_itself(folder: Path, count: int) -> None:
    answers = [
        (from_hashes(row["answer"]), row["answer"].rpartition("#### ")[2])
        for row in _lines(folder / "gsm8k/train.jsonl")
    ]
    assert len(answers) == count
    assert sum(found is not None and answers_equal(found, gold) for found, gold in answers) == count
    assert sum(answers_equal(f"${int(gold.replace(',', '')):,}.00", gold) for _, gold in answers) == count
    assert not any(answers_equal(str(int(gold.replace(",", "")) + 1), gold) for _, gold in answers)


@pytest.mark.parametrize("name", ["MATH_train.jsonl", "math500_test.json"])
@pytest.mark.parametrize("folder", [GOLDEN, SHARED], ids=["golden", "all"])
def test_gold_answers_of_math_are_found_and_equal_themselves(folder: Path, name: str) -> None:
    data = [row for row in _lines(folder / "math" / name) if folder == SHARED or row["answer"]]
    found = sum(answers_equal(from_box(row["solution"]) or "", row["answer"]) for row in data)
    respelled = sum(
        answers_equal(rf"$\boxed{{{row['answer'].replace('frac', 'frac ')} }}$.", row["answer"])
        for row in data
    )
    assert found >= 0.995 * len(data)  # two of the 7,500 golds are empty, which nothing may equal
    assert respelled >= 0.995 * len(data)


def test_distinct_gold_answers_of_math_hardly_ever_equal_each_other() -> None:
    golds = sorted({row["answer"] for row in _lines(SHARED / "math/math500_test.json")})
    pairs = [(gold, golds[(i * 7 + 13) % len(golds)]) for i, gold in enumerate(golds)]
    equal = [pair for pair in pairs if pair[0] != pair[1] and answers_equal(*pair)]
    assert len(equal) <= 3, equal  # a few rows spell the same value differently


def test_plain_numbers_are_judged_within_fifty_microseconds() -> None:
    timings = []
    for number in range(2000):
        start = time.perf_counter()
        answers_equal(str(number), "1234.5")
        timings.append(time.perf_counter() - start)
    assert sorted(timings)[1000] < 50e-6  # measured 4e-6

"""`answers_equal` over layouts, relations, words, times and double spellings: each rule, and where it ends."""

import pytest

from whet.rewards.answers.equal import answers_equal

EQUAL = r"""
# double escapes, malformed and plain-text spellings
\\frac{3}{7}  ==  3/7  ##  2 + \\sqrt{11}  ==  2+\sqrt{11}
\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}  ==  (1,2)
\frac{5\sqrt{}{2}}{3}  ==  \frac{5\sqrt2}{3}  ##  27\  ==  27  ##  $-4\lex\le6$  ==  [-4,6]
x >= 4  ==  x \ge 4  ##  4 <= x  ==  x\geq 4  ##  x != 9  ==  x \neq 9  ##  {8 \choose 3}  ==  56
{3 \over 4}  ==  0.75  ##  17<|im_end|>  ==  17  ##  "19"  ==  19  ##  *19*  ==  19  ##  = 19  ==  19
\text{3^{1/4}}  ==  3^{1/4}  ##  \approx 6.5 \text{ mph}  ==  $\approx 6.5 \text{ mph}$
10²³  ==  10^{23}  ##  x⁻²  ==  1/x^2  ##  a₁₂  ==  a_{12}  ##  3x10^4  ==  30000
\operatorname{arctan} 1  ==  \pi/4  ##  2^3 5^2  ==  200  ##  ⟨1,2,3⟩  ==  (1,2,3)
# numbers
2.5 \times 10^{-3}  ==  1/400  ##  3.703703704 \times 10^{-2}  ==  \frac{1}{27}  ##  0.(27)  ==  3/11
0.\dot{6}  ==  2/3  ##  1.41421  ==  \sqrt2  ##  2.23607  ==  \sqrt{5}  ##  \text{seven}  ==  7
a dozen  ==  12  ##  half a dozen  ==  6  ##  three dozen  ==  36  ##  two dozen  ==  \text{twenty-four}
no solution  ==  \emptyset  ##  \varnothing  ==  There is no solution  ##  \{\}  ==  the empty set
forty-two  ==  42  ##  Two hundred and six  ==  206  ##  EUR 30  ==  30  ##  40¢  ==  40
\frac{3}{4}\text{ percent}  ==  0.0075  ##  \lceil 2.1 \rceil  ==  3  ##  \lfloor -2.5 \rfloor  ==  -3
\sqrt{-9}  ==  3i  ##  (-27)^{2/3}  ==  9  ##  (x^2-5)^{5/3}  ==  (x^2-5)\sqrt[3]{x^2-5}^2
n!  ==  n (n-1)!  ##  \binom{n}{3}  ==  \frac{n(n-1)(n-2)}{6}
# vectors and matrices
60 & 270 & 90 & 180  ==  60 270 90 180  ##  60, 270, 90, and 180  ==  [60, 270, 90, 180]
np.array([60., 270., 90., 180.])  ==  60,270,90,180  ##  [[60],[270],[90],[180]]  ==  60 270 90 180
tensor([3, 4])  ==  (3,4)  ##  ((1,2),(3,4))  ==  \begin{bmatrix}1&2\\3&4\end{bmatrix}
((1,2),(3,4))  ==  [[1,2],[3,4]]
[1, 2; 3, 4]  ==  [[1,2],[3,4]]  ##  1 2; 3 4  ==  \begin{pmatrix}1&2\\3&4\end{pmatrix}
\frac13\begin{pmatrix}3\\6\end{pmatrix}  ==  (1,2)
-\begin{pmatrix}1&2\\3&4\end{pmatrix}  ==  [[-1,-2],[-3,-4]]
# lists
{8, 3}  ==  (8,3)  ##  {8, 3}  ==  \{3,8\}  ##  9, -4, \text{ and } -6  ==  -6,-4,9
p=3,q=2;p=7,q=5  ==  (3,2),(7,5)
\begin{cases} x=4 \\ y=9 \end{cases}  ==  x=4, y=9  ##  x=2 \lor x=6  ==  \{2,6\}
# equations, chains and names
P(X = 2) = 0.5  ==  1/2  ##  |AB| = 6  ==  6  ##  A : B = 3  ==  3  ##  T_{1}:T_{2}=9:14  ==  9:14
\vec{v} = (1,2)  ==  (1,2)  ##  f(x) = 3x  ==  y = 3x  ##  x = 4+5 = 9  ==  9  ##  x = 2+3 = 5  ==  x = 1+4 = 5
\begin{vmatrix} 3 & 1 \\ 1 & 2 \end{vmatrix} = 5  ==  5  ##  23 \bmod 7 = 2  ==  2
\frac{5}{6} \approx 0.833  ==  5/6  ##  \frac{5}{6} \approx 0.833  ==  0.833
\frac{\sqrt5}{5} \approx 0.447  ==  \frac{1}{\sqrt5}
x \approx 8  ==  8  ##  1/4 \approx 7  ==  1/4
G_n = \sum_{k=1}^{n} G_k H_{n-k}  ==  G_n = \sum_{k=1}^n H_{n-k} G_k
# inequalities
-x > -6  ==  x < 6  ##  2x \le 9  ==  (-\infty, 4.5]  ##  3x > 1  ==  x > \frac13
y < 2x + 1  ==  2x - y > -1
0 < f(x) < 3  ==  (0,3)  ##  |x| < 4  ==  (-4,4)  ##  |x| \ge 4  ==  x \le -4 \text{ or } x \ge 4
2 \le |z| \le 5  ==  [-5,-2] \cup [2,5]  ##  x \neq 7  ==  (-\infty,7)\cup(7,\infty)
\{x \mid x > 2\}  ==  (2,\infty)  ##  \{x \in \mathbb{R} : 1 \le x < 5\}  ==  [1,5)
# words, choices, times
no  ==  NO  ##  \text{no}  ==  No  ##  Option C  ==  C  ##  (C) the red cube  ==  C  ##  C. Paris  ==  (C)
Hello, world!  ==  hello world  ##  infinity  ==  \infty  ##  19:45  ==  19:45:00
19:45  ==  7:45 \text{ P.M.}
7:45  ==  7:45 a.m.  ##  4 \pmod{9}  ==  4 (mod 9)  ##  x \equiv 4 \pmod 9  ==  4 \pmod{9}
4 \pmod{9}  ==  4  ##  -3 \bmod 8  ==  5  ##  1 + 17 \bmod 5  ==  3  ##  17 \bmod 5 \cdot 3  ==  6
# a decimal that rounds what it cannot spell out
0.1429  ==  1/7  ##  2.236  ==  \sqrt{5}  ##  3.142  ==  \pi  ##  45.45  ==  \frac{500}{11}
2.7183  ==  2.71828
(1.732, 0.8571]  ==  (\sqrt{3}, \frac{6}{7}]  ##  0.6667 x + 1.732  ==  \frac{2x}{3} + \sqrt3
2.646i  ==  i\sqrt7
# functions of several numbers, sums, products, integrals
\gcd(84, 36)  ==  12  ##  \operatorname{lcm}(6, 10, 15)  ==  30  ##  \max\{7, 3, 5\}  ==  7  ##  min(4, -2)  ==  -2
\gcd(840,360)  ==  120  ##  \gcd(\frac34, \frac52)  ==  1/4  ##  \floor(8.6)  ==  8
\left\ulcorner 4.2 \right\urcorner  ==  5
\max(a, b)  ==  \max(b, a)  ##  \sum_{k=1}^{8} k^2  ==  204  ##  \sum^{8}_{k = 1} k^2  ==  204
\prod_{i=1}^{5} i  ==  120
\sum_{k=1}^{n} k  ==  \frac{n(n+1)}{2}  ##  \sum_{j=0}^{n} 2^j  ==  2^{n+1} - 1
\sum_{k=1}^{\infty} \frac{1}{k^3}  ==  \sum_{k = 1}^\infty k^{-3}
\int_2^5 (x + a)\, dx  ==  \int\limits^{5}_{2} a + x dx
\operatorname{arcsinh} x  ==  \sinh^{-1} x  ##  \operatorname{artanh}(0)  ==  0  ##  e^{I\pi}  ==  -1
4 + 5I  ==  5i + 4
x^2_3  ==  x_{3}^{2}  ##  \bar{x}_n + 1  ==  1 + \overline{x}_n  ##  h_\theta  ==  h_{\theta}  ##  ∛8  ==  2
\mleft( 3, 4 \mright)  ==  (3,4)  ##  \lfloorx\rfloor  ==  \lfloor x \rfloor
# matrices that are worked out
\begin{pmatrix}1&4\\2&3\end{pmatrix} + \begin{pmatrix}5&0\\1&1\end{pmatrix}  ==  [[6,4],[3,4]]
\begin{pmatrix}1&2\\3&4\end{pmatrix} \begin{pmatrix}5\\6\end{pmatrix}  ==  (17, 39)
t\left[\begin{matrix}1\\2\end{matrix}\right] - \begin{pmatrix}t\\1\end{pmatrix}  ==  (0, 2t-1)
\begin{vmatrix} 3 & 1 \\ 1 & 2 \end{vmatrix}  ==  5  ##  \det\begin{pmatrix}2&0&1\\1&3&2\\0&1&1\end{pmatrix}  ==  3
# sets
\{4, 4, 9\}  ==  \{9, 4\}  ##  (1,2), (3,4), (1,2)  ==  (3,4), (1,2)  ##  \{1\} \cup \{2, 3\}  ==  \{1,2,3\}
((0,1) \cup (2,3)) \cup (4,5)  ==  (0,1) \cup (2,3) \cup (4,5)  ##  \{1,2\} \cap \{2,5\}  ==  {2,1} ∩ {2,5}
# one box, one tag, one label; several boxes are a list
\boxed{4} and \boxed{9}  ==  4, 9  ##  \boxed{(4,1)} \text{ for part (a) and } \boxed{(9,2)}  ==  (4,1), (9,2)
\boxed{4} cups and \boxed{9} pans  ==  \boxed{9, 4}  ##  \beginboxed{31}  ==  31
so the total is \boxed{31}  ==  31  ##  <answer>31</answer>  ==  31  ##  The final answer is: 31  ==  31
"""
DIFFERENT = r"""
a dozen  !=  1  ##  two dozen  !=  2  ##  first dozen  !=  12  ##  \emptyset  !=  0  ##  no solution  !=  0
0.(27)  !=  0  ##  five twenty  !=  25  ##  forty-two  !=  43  ##  one  !=  1 1  ##  1.414  !=  \sqrt3
2.23606  !=  \sqrt{6}  ##  2.314 \times 10^{-3}  !=  2314  ##  10²³  !=  10^8  ##  5!=120  !=  5 \neq 120
x^1 0  !=  0 x  ##  3 k  !=  3  ##  \pi a^2  !=  \pi  ##  \pi r  !=  \pi  ##  x  !=  X
[[1,2],[3,4]]  !=  [[1,3],[2,4]]  ##  \frac13\begin{pmatrix}3\\6\end{pmatrix}  !=  (3,6)
60, 90, 270, and 180  !=  [60, 270, 90, 180]  ##  {8, 3}  !=  (3,8)  ##  p=3,q=2;p=7,q=5  !=  (3,2),(5,7)
5 \approx 5.4  !=  5.4  ##  5.4 \approx 5  !=  5  ##  1/4 \approx 7  !=  7  ##  7 = 11a + c  !=  11a + c
f(x) = 3x  !=  y = 2x  ##  x = 3x  !=  y = 3x  ##  4+4 = 9  !=  9  ##  f(x) = 3x  !=  t = 3x
\frac{7}{2} = 5  !=  5  ##  (5,7) = 5  !=  5  ##  5 or 7 = 5  !=  5
x > 6  !=  -x > -6  ##  2x \le 9  !=  (-\infty, 4.5)  ##  y < 2x + 1  !=  y > 2x + 1  ##  y < 2x  !=  y \le 2x
|x| < 4  !=  |x| > 4  ##  x \neq 7  !=  7  ##  x \neq 7  !=  x = 7  ##  y < x + 1  !=  y = x + 1
\{x \mid x > 2\}  !=  2  ##  yes  !=  true  ##  no  !=  on  ##  (C) the red cube  !=  D
(C) red  !=  (D) red
(C) or (D)  !=  C  ##  C. or D. it is  !=  C  ##  Alice, Bob  !=  Alice  ##  7:45 a.m.  !=  7:45 p.m.
12:00  !=  1:00
7:45  !=  7:46  ##  12:30 \text{ a.m.}  !=  12:30 \text{ p.m.}  ##  4 \pmod{9}  !=  4 \pmod{8}
\boxed{31} and \boxed{32}  !=  31  ##  \boxed{31} and \boxed{32}  !=  32  ##  The final answer is not 31  !=  31
\begin{vmatrix} 3 & 1 \\ 1 & 2 \end{vmatrix} = 5  !=  6  ##  \sum_{k=1}^{n} k  !=  \sum_{k=1}^{m} k
\boxed{0} \boxed{1}  !=  0  ##  \boxed{1}\boxed{4}  !=  4
\boxed{4} \boxed{4}  !=  4  ##  \boxed{4} and then \boxed{9}  !=  4, 9  ##  \boxed{4} or \boxed{9}  !=  9
0.143  !=  1/7  ##  0.1428  !=  1/7  ##  3.143  !=  \pi  ##  3.1415  !=  \pi  ##  2.718  !=  2.71828
12.346  !=  12.35
2.7182  !=  2.71828  ##  0.1235  !=  0.12346  ##  1234.6  !=  1234.56  ##  14.142  !=  10\sqrt{3}
1.234e5  !=  246801/2
12345.68  !=  12345.678
0.667 x  !=  \frac{2x}{3}  ##  0.6667 x  !=  \frac{3x}{4}  ##  0.6667 x + 1  !=  0.6668 x + 1
1.732 x  !=  \sqrt3 x^2
\gcd(84, 36)  !=  6  ##  \max(7, 3)  !=  3  ##  \max(a, b)  !=  \min(a, b)  ##  \max(a, b)  !=  a
maximum  !=  minimum
\sum_{k=1}^{8} k  !=  35  ##  \sum_{k=1}^{n} a_k  !=  n a_k  ##  \sum_{k=1}^{n} k  !=  \frac{n(n-1)}{2}
\sum_{k=1}^{\infty} k  !=  \sum_{k=2}^{\infty} k  ##  \int_2^5 x dx  !=  \int_2^6 x dx
\int x dx  !=  \int x dt
13 \bmod 5  !=  2 \bmod 4  ##  1 + 17 \bmod 5  !=  2  ##  x_2  !=  x^2  ##  \bar{x}  !=  x
\sinh^{-1} x  !=  1/\sinh x
\begin{pmatrix}1&2\\3&4\end{pmatrix} \begin{pmatrix}5\\6\end{pmatrix}  !=  (17, 38)
\begin{pmatrix}1&2\\3&4\end{pmatrix} \begin{pmatrix}5&6\end{pmatrix}  !=  (5, 12)
\begin{pmatrix}1\\2\end{pmatrix} + \begin{pmatrix}1\\2\\3\end{pmatrix}  !=  (2, 4)
\begin{pmatrix}1&2\\3&4\end{pmatrix} \begin{pmatrix}5\\6\\7\end{pmatrix}  !=  (17, 39)
\begin{vmatrix} 3 & 1 \\ 1 & 2 \end{vmatrix}  !=  7
\{4, 4\}  !=  4  ##  \{4, 4\}  !=  \{4\}  ##  (0,1) \cap (2,3)  !=  (0,1) \cup (2,3)
\{4, 4, 9\}  !=  \{4\}  ##  4, 4, 9  !=  4, 9  ##  (1,2), (1,2)  !=  (1,2)
\{1,2\} \cap \{2,5\}  !=  \{1,2\} \cup \{2,5\}  ##  \{1,2\} \setminus \{2\}  !=  (\{1,2\}, \{2\})
10 dollars  !=  10 hours  ##  -\infty  !=  infinity
"""


def rows(table: str, sign: str) -> list[tuple[str, str]]:
    """Cut a table into (left, right) pairs; lines that begin with '# ' are headings."""
    lines = [line for line in table.strip().splitlines() if not line.startswith("# ")]
    pairs = [cell.partition(f"  {sign}  ") for line in lines for cell in line.split("  ##  ")]
    assert all(middle for _, middle, _ in pairs)
    return [(left, right) for left, _, right in pairs]


@pytest.mark.parametrize(("left", "right"), rows(EQUAL, "=="))
def test_one_value_in_two_spellings_is_equal_in_both_directions(left: str, right: str) -> None:
    assert answers_equal(left, right)
    assert answers_equal(right, left)


@pytest.mark.parametrize(("left", "right"), rows(DIFFERENT, "!="))
def test_each_rule_ends_where_the_value_changes(left: str, right: str) -> None:
    assert not answers_equal(left, right)
    assert not answers_equal(right, left)


def test_and_keeps_the_order_where_the_caller_asks_for_it() -> None:
    assert answers_equal("3 and 8", "8, 3")
    assert not answers_equal("3 and 8", "8, 3", ordered=True)
    assert answers_equal("3 or 8", "8 or 3", ordered=True)

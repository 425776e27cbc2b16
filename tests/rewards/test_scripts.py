"""Answers in any script: extraction and equality by table, what is not the answer, boxes, and time on hostile text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import LITTLE, SIZE, seconds

from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.extract import Boxed, extract_answer, extract_answer_with_step
from whet.rewards.answers.scripts import VERDICTS, fold, numeral_in_digits
from whet.rewards.answers.texts import Column

# text | the extracted answer | a gold answer that it equals
FOUND = r"""
答案是42 | 42 | 42
答案是42个 | 42 | 42
答案是42元。 | 42 | 42
答案是42个苹果。 | 42 | 42
答案：42 | 42 | 42
答案:４２ | 42 | 42
【答案】42 | 42 | 42
【答案】Ｂ | B | B
答：一共42元。 | 42 | 42
答案为-3。 | -3 | -3
答案是－３。 | -3 | -3
所以答案应该是 $\frac{1}{2}$。 | \frac{1}{2} | 0.5
答案是 **42**。 | 42 | 42
**答案**：42 | 42 | 42
答案是約3.5公里 | 3.5公里 | 3.5 km
答案是3.5公里。谢谢！ | 3.5公里 | 3.5
答案是42，因为6乘7等于42。 | 42 | 42
答案是小明一共有42个苹果 | 42 | 42
答案是四十二 | 四十二 | 42
答案是一百二十元。 | 一百二十元 | 120
答案是３，０００元 | 3,000 | 3000
答案是５０％ | 50% | 0.5
答案是百分之五十。 | 百分之五十 | 50%
答案是三分之一 | 三分之一 | 1/3
答案是3分之1。 | 3分之1 | 1/3
答案是3万元 | 3万元 | 30000
答案是（１，２） | (1,2) | (1,2)
答案是3或5 | 3或5 | 3 or 5
答案是3、5。 | 3;5 | 5, 3
答案是x＝5 | x=5 | 5
所以 $x=5$，答案是 $5$。 | 5 | 5
故选：Ｃ。 | C | C
故选C。 | C | C
因此选（Ｂ）。 | (B) | B
所以选B | B | B
答案是选项B | 选项B | B
答案是是 | 是 | yes
我们得到：<answer>４２</answer> | 42 | 42
最后：\boxed{４２} | 42 | 42
最后：\boxed{四十二} | 四十二 | 42
#### ４２ | 42 | 42
一共42元 | 42 | 42
距离约3.5公里 | 3.5 | 3.5
约3万5千人 | 3万5千 | 35000
人口约1.4億人 | 1.4億 | 140000000
占3分之2 | 3分之2 | 2/3
x=3或x=5 | x=3或x=5 | 3, 5
因为下雨。
是。 | 是 | yes
答えは42です。 | 42 | 42
答えは４２円です | 42 | 42
答え：四十二 | 四十二 | 42
正解はＢです。 | B | B
答えは 3 または 5 です。 | 3 または 5 | 3 or 5
答えは2分の1です | 2分の1 | 0.5
合計は42個になります | 42 | 42
정답은 42입니다. | 42 | 42
정답: 42개 | 42 | 42
답은 42원이다 | 42 | 42
정답은 3만 5천 원입니다. | 3만 5천 원 | 35000
정답은 B입니다. | B | B
الجواب هو ٤٢ | 42 | 42
الجواب هو 42. | 42 | 42
الإجابة النهائية هي: ٤٢. | 42 | 42
الجواب: ٣٫١٤ | 3.14 | 3.14
الجواب هو ١٬٢٣٤ | 1,234 | 1234
الجواب: ٤٢ تفاحة | 42 | 42
الجواب هو ٥٠٪ | 50% | 50%
المجموع ٤٢ | 42 | 42
پاسخ ۴۲ است | 42 | 42
پاسخ: ۴۲ | 42 | 42
पाँच और सात: उत्तर 42 है। | 42 | 42
सही उत्तर है ४२। | 42 | 42
उत्तर: ४२ रुपये | 42 | 42
उत्तर: ५ लाख | 5 लाख | 500000
कुल १,२३,४५६ लोग | 123456 | 123456
উত্তর: ৪২ | 42 | 42
বিডি ৪২ টি | 42 | 42
விடை: ௪௨ | 42 | 42
คำตอบคือ ๔๒ | 42 | 42
התשובה היא 42. | 42 | 42
La respuesta es 42. | 42 | 42
La respuesta es 42 años. | 42 años | 42
La respuesta final es 3,5 metros | 3,5 metros | 3.5
Respuesta: 42 | 42 | 42
A resposta é 42. | 42 | 42
La risposta corretta è 42. | 42 | 42
La réponse est 42. | 42 | 42
Réponse : 42 | 42 | 42
Die Antwort lautet 42. | 42 | 42
Die Antwort ist 1.234,56 Euro. | 1.234,56 Euro | 1234.56
Die Lösung ist 42 Äpfel. | 42 | 42
Ответ: 42 | 42 | 42
Ответ: 42 яблока. | 42 | 42
Правильный ответ — 42. | 42 | 42
Ответ: 5 км | 5 км | 5 km
Cevap: 42 | 42 | 42
Het antwoord is 42. | 42 | 42
Đáp số: 42 | 42 | 42
Cuesta 1.234,56 euros | 1.234,56 | 1234.56
Odp.: 29. Sprawdzenie: 29 - 20 = 9 | 29 | 29
Odp: 29. Sprawdzenie: 29 - 20 = 9 | 29 | 29
**Odp.:** 29. Bo 20 + 9 = 29. | 29 | 29
Odpověď: 29. Zkouška: 29 - 20 = 9 | 29 | 29
Odpoveď je 29. Skúška: 29 - 20 = 9 | 29 | 29
Antw.: 29. Probe: 29 - 20 = 9 | 29 | 29
Lsg.: 29. Probe: 29 - 20 = 9 | 29 | 29
Rép. : 29. Vérification : 29 - 20 = 9 | 29 | 29
Risp.: 29. Verifica: 29 - 20 = 9 | 29 | 29
Rpta: 29. Comprobación: 29 - 20 = 9 | 29 | 29
R: 29. Comprobación: 29 - 20 = 9 | 29 | 29
R.: 29 manzanas (20 + 9) | 29 manzanas | 29
Resp.: 29 maçãs. Prova: 29 - 20 = 9 | 29 | 29
Отв.: 29. Проверка: 29 - 20 = 9 | 29 | 29
Відп.: 29. Перевірка: 29 - 20 = 9 | 29 | 29
ĐS: 29 quả. Vì 29 - 20 = 9 | 29 | 29
উঃ ২৯ টি। ২৯ - ২০ = ৯ | 29 | 29
תשובה: 29. בדיקה: 29-20=9 | 29 | 29
Ans.: 29. Check: 29 - 20 = 9 | 29 | 29
Wynik to 12, a nie 13. | 12 | 12
Odpowiedź to 12 zł, a nie 13 zł. | 12 | 12
Das Ergebnis ist 12, nicht 13. | 12 | 12
Die Antwort ist 12, nicht 13. | 12 | 12
Het resultaat is 12, niet 13. | 12 | 12
El resultado es 12, y no 13. | 12 | 12
O resultado é 12, e não 13. | 12 | 12
Il risultato è 12, non 13. | 12 | 12
Le résultat est 12, et non pas 13. | 12 | 12
Результат 12, а не 13. | 12 | 12
Ответ: 12, а не 13. | 12 | 12
Sonuç 12, 13 değil. | 12 | 12
Kết quả là 12, không phải 13. | 12 | 12
Hasilnya 12, bukan 13. | 12 | 12
答案是12，不是13。 | 12 | 12
结果是12，而不是13。 | 12 | 12
結果は12であり、13ではない。 | 12 | 12
결과는 12이지 13이 아니다. | 12 | 12
النتيجة هي 12 وليس 13 | 12 | 12
התוצאה היא 12 ולא 13 | 12 | 12
परिणाम 12 है, 13 नहीं। | 12 | 12
The radius R: 5, so the area is 78 | 78 | 78
Banans: 5, so 7 | 7 | 7
boki mają odp. 5 i 6 | 6 | 6
Sonuç 13 değil mi? | 13 | 13
是不是13？ | 13 | 13
"""

EQUAL = r"""
４２ | 42 || ３．５ | 3.5 || ３／４ | 3/4 || -３ | -3 || −３ | -3 || ５０％ | 50% || x＝５ | 5 || x＞5 | x>5
（１，２） | (1,2) || ［１，２） | [1,2) || √２ | \sqrt{2} || x²＋１ | x^2+1 || 【42】 | 42 || 「42」 | 42
٤٢ | 42 || ۴۲ | 42 || ٣٫١٤ | 3.14 || ١٬٢٣٤ | 1234 || ٥٠٪ | 50% || ४२ | 42 || ৪২ | 42 || ௪௨ | 42 || ๔๒ | 42
४२ | ٤٢ || 𝟒𝟐 | 42 || १,२३,४५६ | 123456
四十二 | 42 || 十 | 10 || 一百零五 | 105 || 二〇二四 | 2024 || 三点一四 | 3.14 || 负五 | -5
一亿零五 | 100000005
二万三千四百五十六 | 23456 || 壹佰贰拾 | 120 || 四十二个 | 42 || 两百 | 200 || 百二十 | 120 || 五千万 | 50000000
3万 | 30000 || 3万5千 | 35000 || 3万5000 | 35000 || 1.5亿元 | 150000000 || 3百万 | 3000000 || 사십이 | 42
3만 5천 원 | 35000
三分之一 | 1/3 || 二又三分之一 | 7/3 || 百分之五 | 5% || 2分の1 | 0.5 || 3분의 1 | 1/3
42个 | 42 || 42元 | 42 || 3.5公里 | 3.5 || 3.5公里 | 3.5 km || 5厘米 | 5 cm || 5平方厘米 | 5 cm^2
5公斤 | 5 kg
5千米 | 5 km || 12 años | 12 || 5 км | 5 km || 2\sqrt{5}厘米 | 2\sqrt{5} || 5 लाख | 500000
5 миллионов | 5000000
50 процентов | 50% || 50 Prozent | 50% || 42 रुपया | 42 || 42 تفاحة | 42
Ａ | A || （Ｂ） | B || 选B | B || 选项B | (B) || 答案：Ｂ | B || 答案是42 | 42 || ＄5 | 5
3或5 | 3 or 5 || 3和5 | 5, 3 || 3、5 | 3, 5 || 3 или 5 | 5 or 3 || 3 und 5 | 3, 5 || ｘ＝3，ｙ＝4 | x=3, y=4
是 | yes || 否 | no || はい | yes || いいえ | no || نعم | yes || لا | no || हाँ | yes || नहीं | no || sí | yes
ja | yes || nein | no || oui | yes || non | no || да | yes || нет | no || 对 | true || 错误 | false
Да. | yes || 是。 | yes
北京。 | 北京 || Привет | привет || （北京） | 北京
1.234,56 | 1234.56 || 1.234.567 | 1234567 || 1.234.567,5 | 1234567.5 || 1 234,56 | 1234.56 || 3,5 metros | 3.5
"""

DIFFERENT = r"""
42 | 24 || ٤٢ | 24 || ４² | 42 || ３ ４ | 34 || ５，７ | 5 || （1，2） | (2,1) || x＞5 | x<5
四十二 | 43 || 一百二 | 120 || 一百二 | 102 || 三角形 | 3 || 二三 | 23 || 百分之五 | 5/1000 || 三分之一 | 3
2分之1 | 1
3万 | 3 || 3万5 | 35000 || 3万5千 | 3万 || 5千克 | 5000 || 5千米 | 5000 || 3个半 | 3 || 3个半 | 3.5
3点半 | 3 || 이 | 2
5米 | 5公里 || 5米 | 5 km || 5 公斤 | 5 m || 5以上 | 5 || 不是5 | 5 || 大于5 | 5 || 至少5 | 5 || 5元7角 | 5
第3个 | 4
5 oder mehr | 5 || 5 o más | 5 || 5 ou plus | 5 || не 5 | 5 || 5 नहीं | 5 || 5 или 7 | 5 || 5 أو 7 | 7
5 이상 | 5
5或7 | 5 || 5或7 | 7 || 5、7 | 5 || 5和7 | 12 || A和B | A || 42个和7个 | 42 || 42个和7个 | 7 || 1、234 | 1234
是 | no || 是 | 否 || да | no || はい | いいえ || 北京 | 上海 || 对 | no || 不是 | yes
1.234 | 1234 || 1.234,56 | 1234 || 3,5 | 35 || 1,5 | 15 || 3,5 | 3 || 1,23,456 | 123456 || 1.23.456 | 123456
＼boxed{0}＼boxed{5} | 0 || \boxed｛0｝\boxed｛5｝ | 0 || \boxed｛0｝\boxed｛5｝ | 5
＜answer＞5＜/answer＞ | 5
"""

# A text with numbers, and what must not be taken for its answer.
NOT_THE_ANSWER = r"""
答案不是5，因为3更小 | 5
答案不是5。 | 5
答案不是5，因为3更小 | 3
答案是大于5 | 5
答案是5以上 | 5
答案是5或7 | 5
答案是5或7 | 7
x=3或x=5 | 5
答案是3万 | 3
约3万人 | 3
占3分之2 | 2
人口约1.4億人 | 1.4
答案是三个半 | 3
答案是5元7角 | 7
答案是小明有3个，小红有5个 | 3
答案是小明有3个，小红有5个 | 5
答えは5ではありません。 | 5
答えは5以上です。 | 5
정답은 5가 아닙니다. | 5
정답은 5 이상입니다. | 5
الجواب ليس ٥ | 5
उत्तर 5 नहीं है। | 5
La respuesta no es 5. | 5
La réponse n'est pas 5. | 5
Die Antwort ist nicht 5. | 5
Ответ не 5. | 5
Ответ: больше 5 | 5
La respuesta es 1.234,56 euros | 56
Cuesta 1.234,56 euros | 56
कुल १,२३,४५६ | 456
答案是＼boxed{5} | 5
Nie 13. | 13
Die Antwort ist nicht 13. | 13
12 lub 13, a nie 14 | 14
\boxed{5}、\boxed{7} | 5
\boxed{5}、\boxed{7} | 7
答案是５，７ | 7
答案是A和B | A
"""


def cells(table: str) -> list[tuple[str, ...]]:
    """Cut a table into rows: one a line, or several with `||` between them."""
    # A row may continue on the next line where the text itself has two lines.
    lines, rows = table.strip().splitlines(), []
    carried = ""
    for line in lines:
        line = carried + line
        carried = "" if " | " in line else line + "\n"
        if not carried:
            rows += [tuple(cell.strip(" ") for cell in row.split(" | ")) for row in line.split(" || ")]
    return rows


# spellings of 12.50 in one currency
MONEY = """
12.50 zł|12,50 zł|12.50 PLN|12,50 PLN|PLN 12.50|12,50 złotych|12.50 złote|12.50 zl|12.50 zł.|12.50
$12.50|12.50 USD|USD 12.50|US$12.50|US $12.50|12.50 dollars|12,50 dólares|12.50 US dollars|12.50 долларов|\\$12.50
$12.50|C$12.50|CA$ 12.50|12.50 CAD|CAD 12.50|12.50 dollars|12.50 Canadian dollars|$12.50 CAD
A$12.50|12.50 AUD|AUD 12,50|$12.50|12.50 Australian dollars
MX$12.50|12.50 MXN|$12.50|12.50 pesos|12.50 Mexican pesos
€12.50|12,50 €|12.50 EUR|EUR 12,50|12.50 euros|12.50 евро|12,50€
£12.50|12.50 GBP|12.50 pounds|GBP 12.50|12.50 pounds sterling|12.50 £
¥12.50|12.50 JPY|12.50 yen|12.50円|JPY 12.50|￥12.50
¥12.50|12.50 CNY|12.50元|12.50 yuan|RMB 12.50
₹12.50|Rs. 12.50|INR 12.50|12.50 rupees|12.50 रुपये|12.50 ₹
12,50 Kč|12.50 CZK|CZK 12,50|12.50 korun|12.50 Czech crowns
12,50 Ft|12.50 HUF|12.50 forint
12,50 kr|12.50 kr.|kr 12,50|kr. 12.50|12.50 SEK|12.50 kronor|SEK 12.50|12.50 Swedish kronor
12,50 kr|12.50 DKK|12.50 kroner|DKK 12.50
12,50 kr|12.50 NOK|12.50 kroner|12.50 Norwegian kroner
12.50 CHF|CHF 12.50|Fr. 12.50|12,50 Fr.|12.50 francs|12.50 Franken
R$ 12,50|12.50 BRL|BRL 12.50|12,50 reais|R\\$12.50|12.50 R$
12,50 TL|₺12.50|12.50 TRY|12,50 ₺|12.50 lira
12,50 ₽|12.50 RUB|12.50 руб.|12,50 рублей|12.50 р.|RUB 12.50
12,50 ₴|12.50 UAH|12.50 грн|12,50 гривень
₩12.50|12.50 KRW|12.50원|12.50 won
₪12.50|12.50 ₪|12.50 ILS|12.50 שקלים|NIS 12.50
1 234,50 €|1234.50 EUR|€1,234.50
1 234,50 zł|1234.50 PLN|PLN 1,234.50
"""
OTHER_MONEY = """
$12.50|12,50 zł || 12.50 EUR|12,50 zł || 12,50 €|12,50 zł || 1 234,50 €|1 234,50 zł || $12.50|€12.50 || C$12.50|A$12.50
12.50 CAD|12.50 USD || US$12.50|12.50 Canadian dollars || 12.50 pesos|12.50 dollars || 12.50 SEK|12.50 DKK
12.50 kronor|12.50 NOK || 12,50 kr|12,50 Kč || 12.50 JPY|12.50 CNY || 12.50円|12.50元 || ₽12.50|₴12.50
12,50 грн|12,50 руб. || ₩12.50|¥12.50 || ₪12.50|$12.50 || R$ 12,50|$12.50 || CHF 12.50|12.50 EUR || 12.50 zł|12.51 PLN
12,50 Ft|12,50 zł || TRY 12.50|12.50 RUB || £12.50|12.50 lb || 12.50 kg|12.50 PLN || 12 Kč|12 apples
US$12.50|1250 groszy
"""


@pytest.mark.parametrize("column", ["", "comma"])
@pytest.mark.parametrize("spellings", MONEY.strip().splitlines())
def test_a_currency_is_the_same_in_all_its_spellings(spellings: str, column: Column) -> None:
    amounts = spellings.split("|")
    wrong = [
        (left, right)
        for left in amounts
        for right in amounts
        if not answers_equal(left, right, column=column)
        or answers_equal(left.replace("50", "51"), right, column=column)
    ]
    assert not wrong


@pytest.mark.parametrize("column", ["", "comma"])
@pytest.mark.parametrize("pair", OTHER_MONEY.strip().replace("\n", " || ").split(" || "))
def test_two_currencies_are_not_equal(pair: str, column: Column) -> None:
    left, right = pair.split("|")
    assert not answers_equal(left, right, column=column)
    assert not answers_equal(right, left, column=column)


def test_the_tables_are_long_enough() -> None:
    assert len(cells(FOUND)) >= 90
    assert len(cells(EQUAL)) + len(cells(DIFFERENT)) >= 150


@pytest.mark.parametrize(("text", "answer", "gold"), cells(FOUND))
def test_the_answer_is_found_in_any_script(text: str, answer: str, gold: str) -> None:
    found = extract_answer(text)
    assert found == answer
    assert answers_equal(found, gold)
    assert answers_equal(gold, found)


def test_a_bare_letter_before_a_colon_is_no_answer_but_in_the_last_line() -> None:
    assert extract_answer("20 + 9 = 29\nR: 29 manzanas\n") == "29 manzanas"
    assert extract_answer("R: 5 cm\nh: 10 cm\nSo the volume is 785") == "785"
    assert extract_answer("Resp: 18/min\nSo 4") == "4"


@pytest.mark.parametrize(("left", "right"), cells(EQUAL))
def test_spellings_of_other_scripts_are_equal(left: str, right: str) -> None:
    assert answers_equal(left, right)
    assert answers_equal(right, left)


@pytest.mark.parametrize(("left", "right"), cells(DIFFERENT))
def test_other_values_stay_different(left: str, right: str) -> None:
    assert not answers_equal(left, right)
    assert not answers_equal(right, left)


@pytest.mark.parametrize(("text", "wrong"), cells(NOT_THE_ANSWER))
def test_a_number_that_is_not_the_answer_does_not_count(text: str, wrong: str) -> None:
    found = extract_answer(text)
    assert found is None or not answers_equal(found, wrong)


@pytest.mark.parametrize("space", ["\u00a0", "\u202f", "\u2009"])
def test_spaces_that_do_not_break_group_digits(space: str) -> None:
    assert extract_answer(f"La réponse est 1{space}234,5.") == "1234,5"
    assert extract_answer(f"Le prix est 12{space}345 euros") == "12345"
    assert extract_answer(f"en 2024{space}100 personnes") == "100"
    assert answers_equal(f"12{space}345", "12345")
    assert not answers_equal(f"12{space}34", "1234")


BOXES = [
    # completion, gold, right
    (r"so $x=\boxed{2}$ or $x=\boxed{3}$", "2, 3", True),
    (r"so $x=\boxed{2}$ or $x=\boxed{3}$", r"\{3, 2\}", True),
    (r"so $x=\boxed{2}$ or $x=\boxed{3}$", "2 or 3", True),
    (r"so $x=\boxed{2}$ or $x=\boxed{3}$", "2, 4", False),
    (r"so $x=\boxed{2}$ or $x=\boxed{3}$", "2, 3, 4", False),
    (r"so $x=\boxed{2}$ or $x=\boxed{3}$", "2", False),
    (r"One root is \boxed{2}." + " It can be checked." * 20 + r" The other root is \boxed{3}.", "3, 2", True),
    (r"One root is \boxed{2}." + " It can be checked." * 20 + r" The other root is \boxed{3}.", "3", True),
    (r"\boxed{2}。另一个是\boxed{３}。", "2, 3", True),
    (r"\boxed{2}, \boxed{3}, \boxed{4}", "2, 3", False),  # more boxes than members
    (r"\boxed{1} \boxed{2} \boxed{3} \boxed{4} \boxed{5}", "2, 3", False),
    (r"\boxed{2} and \boxed{3} and again \boxed{2}", "2, 3", False),
    (r"\boxed{2} and \boxed{2}", "2, 3", False),
    (r"\boxed{5} and \boxed{5}", "5, 5", True),
    (r"\boxed{2} and \boxed{3}", "(2, 3)", True),
    (r"\boxed{3} and \boxed{2}", "(2, 3)", False),  # order counts in a tuple
    (r"\boxed{2} is the first and \boxed{3} the other", "[2, 3)", False),  # an interval is no list
    (r"\boxed{(1,2)} and \boxed{(3,4)}", "(3,4), (1,2)", True),
    (r"First \boxed{(1,2)}. Also \boxed{(1,2)}. Last \boxed{(3,4)}", "(1,2), (3,4)", False),
    (r"\boxed{1, 2} and \boxed{3}", "1, 2, 3", False),  # one member each
    (r"\boxed{2}. Wait, it is \boxed{3}", "2, 3", False),
    (r"\boxed{2}. No, it is \boxed{3}", "2, 3", False),
    (r"\boxed{2} and then \boxed{3}", "2, 3", False),
    (r"\boxed{2}。不对，是\boxed{3}", "2, 3", False),
    (r"\boxed{2}, \boxed{3}", "2", False),  # one value: boxes in a row are a hedge, as ever
    (r"\boxed{2}, \boxed{3}", "3", False),
    (r"I had \boxed{2}. Now I have \boxed{3}", "3", True),
    (r"I had \boxed{2}. Now I have \boxed{3}", "2", False),
    (r"\boxed{\boxed{2}} and \boxed{3}", "2, 3", True),
    (r"So \boxed{2} and \boxed{3}. Both: \boxed{2, 3}", "2, 3", True),
]


@pytest.mark.parametrize(("text", "gold", "is_right"), BOXES)
def test_boxes_are_the_members_of_a_gold_answer_of_several(text: str, gold: str, is_right: bool) -> None:
    found = extract_answer(text)
    assert found is not None
    assert answers_equal(found, gold) == is_right


def test_several_boxes_in_an_answer_block_are_judged_alike() -> None:
    text = r"$x=\boxed{2}$ or, as is seen by another substitution of the same kind in the second line, $\boxed{3}$"
    assert answers_equal(text, "3, 2")
    assert not answers_equal(text, "3, 2, 1")
    assert not answers_equal(text, "(3, 2)")
    assert not answers_equal(text, "2")
    assert not answers_equal(text, "3, 2", ordered=True)


def test_an_answer_of_several_boxes_is_the_last_one_as_text() -> None:
    found = extract_answer(r"I had \boxed{4} and now \boxed{5}")
    assert isinstance(found, Boxed)
    assert (found, found.boxes) == ("5", ("4", "5"))
    assert type(extract_answer(r"\boxed{5}")) is str


NUMERALS = """
三千米 3 千米|三千元 3000|千 1000|二万零九百 20900|二万零九百零一 20901|1.25万 12500|一千零五十 1050
千五十 1050|백이 102|42 |三角形 |一千零零五 |一千零五百 |一百零十 
一万二 |十百 |零十 |1.23456万 |3分之 |万 10000|亿万 100010000
"""


@pytest.mark.parametrize("row", NUMERALS.strip().replace("\n", "|").split("|"))
def test_numerals(row: str) -> None:
    text, _, digits = row.partition(" ")
    assert numeral_in_digits(text) == (digits or None)


CHINESE = "零一二三四五六七八九"


def in_chinese(number: int) -> str:
    """Spell a number below 100,000,000 as a textbook does."""
    if number >= 10_000:
        high, low = divmod(number, 10_000)
        return in_chinese(high) + "万" + ("零" if 0 < low < 1000 else "") + (in_chinese(low) if low else "")
    text, gap = "", False
    for power, mark in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // power % 10
        if digit:
            text += ("零" if gap and text else "") + CHINESE[digit] + mark
            gap = False
        else:
            gap = True
    return text or CHINESE[0]


@given(st.integers(0, 99_999_999))
@settings(max_examples=300, deadline=None)
def test_chinese_numbers_are_their_number(number: int) -> None:
    assert numeral_in_digits(in_chinese(number)) == str(number)
    assert answers_equal(in_chinese(number) + "个", str(number))
    assert not answers_equal(in_chinese(number), str(number + 1))


DIGITS = [
    "０１２３４５６７８９",
    "٠١٢٣٤٥٦٧٨٩",
    "۰۱۲۳۴۵۶۷۸۹",
    "०१२३४५६७८९",
    "০১২৩৪৫৬৭৮৯",
    "௦௧௨௩௪௫௬௭௮௯",
    "๐๑๒๓๔๕๖๗๘๙",
    "༠༡༢༣༤༥༦༧༨༩",
]
FRAMES = ["{}", "答案是{}个。", "الجواب: {}", "उत्तर: {}"]


@given(st.integers(-(10**9), 10**9), st.sampled_from(DIGITS), st.sampled_from(FRAMES))
@settings(max_examples=200, deadline=None)
def test_digits_of_every_script_are_their_number(number: int, digits: str, frame: str) -> None:
    written = frame.format(str(number).translate(str.maketrans("0123456789", digits)))
    found = extract_answer(written)
    assert found is not None
    assert answers_equal(found, str(number))
    assert not answers_equal(found, str(number + 1))


def test_fold_keeps_markup_apart() -> None:
    assert fold("＼｛｝＜＞＃＄") == "＼｛｝＜＞＃＄"
    assert fold("plain ASCII") == "plain ASCII"
    assert fold("\u200f٤٢\u061c") == "42"
    assert fold("1、2，3：４（５）") == "1;2,3:4(5)"
    assert all(fold(fold(word)) == fold(word) for word in VERDICTS)


@given(st.text(max_size=80), st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_text_is_folded_once_and_judged_symmetrically(left: str, right: str) -> None:
    assert fold(fold(left)) == fold(left)
    assert len(fold(left)) <= len(left)
    assert answers_equal(left, right) == answers_equal(right, left)
    answer, step = extract_answer_with_step(f"答案是{left}")
    assert (answer is None) == (step is None)


LOOP_ROWS = """
答案是|答案|答：|【答案】|故选|答えは|정답은|الجواب |الجواب هو |उत्तर |respuesta final |réponse : |Ответ |٣|４|४,|१२,
٬|。|、|，|3万|3万5千|百|四十|一百零|3分之|又三分之|42个|个|5或| или |是|不|1.234|1.234,5|1.234.|公里/|公里 |平方
Ａ|（|１，|ñ|é |하|\\boxed{1} 和 |\\boxed{1}、|\\boxed{1} wait |\\boxed{\\boxed{1}} |\u200f|\u202f123|1\u00a0|9\u202f
Odp.: |Antw|R: |, a nie 5| nicht 5,|，不是5|5 değil |5이 아니다 |5 zł |zł |kr. 5 |$5 |Ans.: 
"""
LOOPS = [*LOOP_ROWS.strip("\n").replace("\n", "|").split("|"), "\nR: 5", "\nR: ", "\n\nR :"]


@pytest.mark.ci
@pytest.mark.parametrize("unit", LOOPS)
def test_a_loop_in_any_script_takes_linear_time(unit: str) -> None:
    for size in (SIZE, 3990, 900):
        loop = (unit * (size // len(unit) + 1))[:size]
        for text in (loop, f"{loop} 5", f"答案是{loop}", f"${loop}$"):
            assert seconds(extract_answer, text) < LITTLE
            assert seconds(answers_equal, text, "x+5") < LITTLE
            assert seconds(answers_equal, text[1:], text) < LITTLE
        for text in (loop + r"\boxed{2}", r"\boxed{2}" + loop + r"\boxed{3}"):
            assert seconds(lambda text: answers_equal(extract_answer(text) or "", "2, 3"), text) < LITTLE

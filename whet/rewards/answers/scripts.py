"""Other scripts and languages: digits, punctuation, "the answer is", yes and no, units, Chinese numerals.

`fold` writes a text with the digits and the punctuation that all rules here are written in; the tables below hold the
words. Full-width marks that mean something to LaTeX or to tags (backslash, braces, angle brackets, hash, dollar) are
never folded: that would make markup of what is none.
"""

from __future__ import annotations

import re
import unicodedata

FOREIGN = (
    "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u0191\u0193-\u024f"  # accented Latin, without × ÷ ƒ
    "\u0386-\u0390\u03aa-\u03b0\u03ca-\u03ce"  # Greek with accents; without, it is mathematics
    "\u0400-\u0963\u0965-\u1cff\u1e00-\u1fff"  # Cyrillic to Vedic: letters with their marks; Vietnamese, old Greek
    "\u3005-\u3007\u3040-\u31ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"  # Chinese, Japanese, Korean
    "\U00020000-\U0003ffff"
)
"""Inside of a character class: letters that occur in words, never in formulas."""
FOREIGN_LETTER = re.compile(f"[{FOREIGN}]")
WORD = f"[A-Za-z{FOREIGN}]+"

# Full-width letters and digits are one to one; of the marks, those without a meaning to LaTeX.
_MARKS = {
    **dict(zip("％，．：；（）［］＋－＝／＊＇＂＆＠", "%,.:;()[]+-=/*'\"&@", strict=True)),
    **dict(
        zip("、､【】〔〕∶٫٬،؛٪￥", ";;[]():.,,;%¥", strict=True)
    ),  # an enumeration comma never groups digits
    **dict.fromkeys("｡।॥۔", "。"),
    # invisible marks of direction in Arabic and Hebrew text
    **dict.fromkeys("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", ""),
    **{chr(code): chr(code - 0xFEE0) for code in (*range(0xFF21, 0xFF3B), *range(0xFF41, 0xFF5B))},
}


class _Table(dict[int, str]):
    """Character code -> what it is folded to, filled as characters occur."""

    def __missing__(self, code: int) -> str:
        digit = unicodedata.decimal(chr(code), None)
        self[code] = chr(code) if digit is None else str(digit)
        return self[code]


_TABLE = _Table({ord(mark): plain for mark, plain in _MARKS.items()})
# 1,23,456 is a number only where its digits are Indian: in Western ones it is a list of three.
_INDIAN_GROUPS = re.compile(
    r"(?<![\d,.])[\u0966-\u096f\u09e6-\u09ef\u0a66-\u0a6f\u0ae6-\u0aef\u0be6-\u0bef\u0c66-\u0c6f\u0ce6-\u0cef\u0d66-\u0d6f]{1,2}"
    r"(?:,\d\d){1,6},\d{3}(?![\d,])"
)
_SPACES = "\u00a0\u2009\u202f"
_SPACED_GROUPS = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:[{_SPACES}]\d{{3}}){{1,9}}(?!\d)")
"""Thousands as French and Russian write them: the space does not break, so it is none between two numbers."""


def fold(text: str) -> str:
    """Write digits of any script, full-width letters, and punctuation in ASCII; a full stop of any script as `。`.

    Args:
        text: Any text; ASCII is returned as it is.

    Returns:
        The text with at most as many characters.
    """
    if text.isascii():
        return text
    if "," in text:
        text = _INDIAN_GROUPS.sub(lambda match: match.group().replace(",", ""), text)
    if any(space in text for space in _SPACES):
        text = _SPACED_GROUPS.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    return text.translate(_TABLE)


_ANSWER_WORDS = (
    # Chinese; "therefore choose B" ends the solution of a multiple-choice question
    ("答案", "答案", "(?=并?並?不是)|(?:应该|應該|应|應|就|便)?(?:是|为|為|等于|等於)|[\\]】]"),
    ("答", "答", "(?!)"),
    ("选 選", "(?:[故应應]|因此|所以|答案|本题|本題)[选選](?:择|擇)?", ""),
    # Japanese, Korean: the verb comes last
    ("答え 解答 正解 こたえ", "答え|解答|正解|こたえ", "は"),
    ("답", "정답|해답|(?<![가-힣])답", "[은는]"),
    # Arabic, Persian and Urdu, Hebrew
    (
        "جواب جاب",
        "(?:جواب|[إا]جاب[ةه])(?: النهائي| النهائية| الصحيح| الصحيحة)?",
        " ?(?:هو|هي)(?=[ :])|(?= ليس)| (?=[0-9$\\\\])",
    ),
    ("پاسخ", "پاسخ(?: نهایی| درست)?", " برابر(?: است)? با| (?=[0-9$\\\\])"),
    ("תשובה", "(?<![א-ת])ה?תשובה(?: הסופית| הנכונה)?", " היא| הוא"),
    # Hindi, Bengali, Tamil, Thai
    ("उत्तर जवाब", "उत्तर|जवाब", " है| (?=[0-9$\\\\])"),
    ("উত্তর", "উত্তর", " হলো?"),
    ("উঃ", "উঃ", " ?(?=[0-9$\\\\])"),
    ("விடை பதில்", "விடை|பதில்", " (?=[0-9$\\\\])"),
    ("คำตอบ", "คำตอบ(?:สุดท้าย)?", " ?คือ"),
    # Spanish, Portuguese, Italian, French
    ("espuesta olución", "[Rr]espuesta(?: final| correcta)?|[Ss]olución(?: final)?", " es| son|(?= no es)"),
    ("esposta", "[Rr]esposta(?: final| correta| certa)?", " é| são|(?= não é)"),
    ("isposta", "[Rr]isposta(?: finale| corretta)?", " è| sono|(?= non è)"),
    ("éponse", "[Rr]éponse(?: finale| correcte| exacte)?", " est| vaut|(?= n.est pas)"),
    # German, Dutch, Polish, Czech and Slovak, Russian, Ukrainian, Turkish, Vietnamese, Indonesian
    ("ntwort ösung", "[Aa]ntwort|[Ll]ösung", " lautet| ist"),
    ("ntwoord", "[Aa]ntwoord", " is| luidt"),
    ("dpowiedź", "[Oo]dpowiedź", " to"),
    ("dpověď dpoveď", "[Oo]dpov[eě]ď", " je(?! ne)|(?= není| nie je)"),
    ("твет ідповідь", "[Оо]твет|[Вв]ідповідь", " ?[—–-]| равен| равна| это| (?=не |[0-9$\\\\])"),
    ("evap anıt", "[Cc]evap|[Yy]anıt", " (?=[0-9$\\\\])"),
    ("áp âu", "[Đđ]áp (?:án|số)|[Cc]âu trả lời", " là"),
    ("awaban", "[Jj]awaban(?:nya)?(?: akhir)?", " adalah"),
    # Abbreviations, before a colon only; those that mean other things, too, start the last line.
    (
        "dp ntw Lsg ép isp ta тв ідп ĐS Đ/",
        r"(?<![^\W\d_])(?:[Oo]dp|[Aa]ntw|Lsg|[Rr]ép|[Rr]isp|Rp?ta|[Оо]тв|[Вв]ідп|ĐS|Đ/[Ss])\.?",
        "(?!)",
    ),
    ("R", r"(?m:^)R(?:esp)?\.?(?=[ \u00a0\u202f]?:[^\n]{0,100}\s*\Z)", "(?!)"),
)
"""By language: literals of which each noun contains one; nouns for an answer; verbs that may replace a colon."""
_ANSWER_PATTERNS = [
    (stems.split(), rf"(?:{nouns})\*{{0,3}}(?:{verbs}|[ \u00a0\u202f]?[:：=])[:：*]{{0,3}}")
    for stems, nouns, verbs in _ANSWER_WORDS
]
ANSWER_IS = "|".join(pattern for _, pattern in _ANSWER_PATTERNS)
"""Pattern of "the answer is" in languages other than English; no alternative repeats, so a search is linear."""
_ANSWER_SEARCHES = [(stems, re.compile(pattern)) for stems, pattern in _ANSWER_PATTERNS]


def end_of_phrase(text: str) -> int:
    """Return where the last "the answer is" in a language other than English ends; -1 without one."""
    end = -1
    for stems, pattern in _ANSWER_SEARCHES:
        if any(stem in text for stem in stems):  # a search of 128 KB for all languages at once takes 40 ms
            end = max([end, *(match.end() for match in pattern.finditer(text))])
    return end


FINAL_VERBS = (
    *("となります", "になります", "でした", "である", "です", "입니다", "이에요", "예요", "이다"),
    *(" है", " हैं", " होगा", " است", " می‌باشد", " ہے"),
)
"""Verbs after an answer, where "is" comes last."""
_BECAUSE = "因为|因為|なぜなら|왜냐하면|لأن|زیرا|क्योंकि|porque|parce que|car |perché|weil |denn |потому"
_BECAUSE_SEARCH = re.compile(rf"[,;。]? ?(?:{_BECAUSE})")


def start_of_reason(text: str) -> int:
    """Return where the first "because" in a language other than English starts; -1 without one."""
    match = _BECAUSE_SEARCH.search(text) if any(word in text for word in _BECAUSE.split("|")) else None
    return match.start() if match else -1


_LETTER = r"[^\W\d_]"
_DENIAL = (
    rf"(?<!{_LETTER})(?:(?:a )?nie(?: jest)?|a ne|nikoliv?|(?:und )?nicht|(?:en )?niet|y no(?: es)?|no es|(?:et )?pas"
    r"|(?:et |e )?non(?: pas| è)?|(?:e )?não(?: é)?|(?:[аи] )?не|(?:chứ )?không phải(?: là)?|bukan"
    r"|ו?לא|و?ليست?|ولا|و نه|न कि) |(?<!是)而?不是|而非|[并並]非"
)
"""Not, directly before what it denies. A bare `no` is none: in English it numbers, or corrects what precedes."""
DENIED_BEFORE = re.compile(rf"(?:{_DENIAL})[(*$]{{0,3}}$", re.IGNORECASE)
DENIED_AFTER = re.compile(
    rf"[*$)\]]{{0,3}}['’ ]?{_LETTER}{{0,4}} ?(?:değil(?! m[iı])|नहीं|নয়|அல்ல|نہیں|아니[다라고며에]|아닙니다"
    r"|(?:では|じゃ)(?:ない(?![かで])|なく|ありません(?!か)))"
)
"""Not, behind what it denies; no question whether it is not that."""
REJECTED = re.compile(rf"(?:(?<=[0-9)\]}}%$])|(?=,)),? ?(?:{_DENIAL})(?=[-+$\\(]{{0,3}}[0-9])", re.IGNORECASE)
"""What follows is another answer, which is rejected: `12, a nie 13`."""
HEDGED = re.compile(
    "[不没沒非無无或半几幾余餘]|以[上下内內外]|[大小多少][于於]|超[过過]|至[少多]|未満|より|ない|ません"
    "|아니|아닙|않|이상|이하|초과|미만|또는|혹은|नहीं"
    rf"|(?<![A-Za-z{FOREIGN}])(?:ليس|غير|أكثر|أكبر|أقل|أصغر|أو|अधिक|कम|या|o|ou|oder|или|no|não|non|ne|nicht|kein|keine|не"
    r"|нет|más|menos|mayor|menor|mais|maior|plus|moins|pas|più|meno|mehr|weniger|über|unter|больше|меньше|более|менее)"
    rf"(?![A-Za-z{FOREIGN}])",
    re.IGNORECASE,
)
"""Not, more than, less than, or, half: what stands beside such a word is not the number alone."""
ABOUT = "约|約|大约|大約|共|一共|总共|總共|合计|共计|有|および?|約|약|총"
JOINED = re.compile(
    r"(?<=[0-9A-Za-z)\]}%$°π])"
    r"(?:(?P<any> ?(?:或者|或是|或|または|もしくは|또는|혹은) ?| (?:أو|یا|या|или|або|oder|ou) )|"
    r" ?(?:以及|和|与|與|及|および|と|및|와|과) ?| (?:और|और|и|und|et) )"
    r"(?=[-+\u2212\\$(\[{0-9A-Za-z√π])"
)
"""Or (group `any`) and "and", between two values."""

_VERDICTS = """
yes 是 是的 はい 예 네 نعم بله بلی हाँ हां जी sí sì sim ja oui да так evet tak ใช่ có כן
no 否 不是 不 いいえ 아니요 아니오 لا خیر नहीं não nein non нет ні hayır nie ไม่ใช่ không לא nee
true 对 對 正确 正確 真 正しい 참 صحيح सही सत्य verdadero verdadeiro vrai wahr richtig верно правда
false 错 錯 错误 錯誤 假 偽 거짓 خطأ गलत असत्य falso faux falsch неверно ложь
"""
VERDICTS = {
    word: row.split()[0]
    for row in _VERDICTS.strip().splitlines()
    for word in unicodedata.normalize("NFC", row).split()
}
"""Word in lower case -> yes, no, true or false in English."""

UNITS = """
cm 厘米 公分 センチメートル センチ 센티미터 سم सेमी см сантиметр сантиметра сантиметров centímetros centimètres
mm 毫米 ミリメートル ミリ 밀리미터 مم मिमी мм миллиметров
m 米 公尺 メートル 미터 متر م मीटर м метр метра метров metros mètres
km 公里 千米 キロメートル 킬로미터 كم किमी км километр километра километров kilómetros kilomètres quilômetros
g 克 グラム 그램 غرام ग्राम г грамм граммов gramos grammes gramm
kg 千克 公斤 キログラム キロ 킬로그램 كجم किलोग्राम किग्रा кг килограммов kilogramos
s 秒 秒钟 秒鐘 초 ثانية सेकंड с секунд секунды segundos secondes sekunden
min 分钟 分鐘 분 دقيقة मिनट мин минут минуты minutos minuten
h 小时 小時 時間 시간 ساعة ساعات घंटे घंटा ч час часа часов horas heures stunden
day 天 日 일 يوم أيام दिन день дня дней días jours tage
week 周 週 주 أسبوع सप्ताह недель semanas semaines wochen
month 个月 個月 か月 개월 شهر महीने месяцев meses mois monate
year 年 岁 歲 歳 년 살 سنة वर्ष साल лет года año años ans jahre anos
l 升 リットル 리터 لتر लीटर л литров litros
ml 毫升 ミリリットル 밀리리터 مل मिली мл
degree 度 درجة डिग्री градусов grados degrés grad
"""
"""Units of measurement, one a line: the name that `whet.rewards.answers.units` knows, then synonyms."""
CURRENCIES = """
dollarsign $ ＄ |
dollar | dollars bucks dólar dólares dollari dolar dolara dolary dolarów доллар доллара доллары долларов
dollar | долар долара долари доларів ドル 달러 دولار डॉलर
usd USD US$ | 美元 美金
cad CAD CA$ Can$ C$ | 加元
aud AUD AU$ A$ | 澳元
nzd NZD NZ$ |
sgd SGD S$ |
hkd HKD HK$ | 港元
twd TWD NT$ | 新台币 新台幣
peso | pesos
mxn MXN MX$ Mex$ |
ars ARS |
clp CLP |
cop COP |
php PHP ₱ |
euro EUR € | euros 欧元 歐元 ユーロ 유로 يورو यूरो евро євро avro
gbp GBP £ | sterling 英镑 英鎊
yensign ¥ |
yen JPY | 円 日元 엔 ين
yuan CNY RMB | 元 人民币 人民幣 元人民币 块钱
rupee INR Rs ₹ | rupees रुपये रुपया रुपए रुपयों ரூபாய் روپے
real BRL R$ | reais
pln PLN zł | zl złoty złote złotych złotego zloty zlotys zlotych
czk CZK Kč | kc koruna koruny korun
huf HUF | forint forints forintot
crown | crowns
kr kr |
sek SEK | krona kronor
krone | kroner
dkk DKK |
nok NOK |
isk ISK | króna krónur
franc CHF Fr SFr | francs franken franchi
lira TRY TL ₺ | liras lirası lire
ruble RUB ₽ руб | rubles рубль рубля рубли рублей р rubel rubli rublos
hryvnia UAH ₴ грн | hryvnias гривня гривні гривень гривна гривны гривен
won KRW ₩ | 원
shekel ILS NIS ₪ | shekels שקל שקלים שח
baht THB ฿ | บาท
dong VND ₫ đ | đồng
rupiah IDR Rp |
rand ZAR | rands
leu RON | lei
lev BGN лв | лев лева leva
riyal SAR | riyals ريال ريالا ریال
toman | tomans تومان
dirham AED | dirhams درهم
taka BDT ৳ | টাকা
tenge KZT ₸ | тенге
"""
"""Currencies: a name, the signs and codes that may stand before an amount, too; then words that only follow it."""
SHARED = {
    name: frozenset(others.split())
    for name, others in {
        "dollarsign": "dollar usd cad aud nzd sgd hkd twd peso mxn ars clp cop",
        "dollar": "usd cad aud nzd sgd hkd twd",
        "peso": "mxn ars clp cop php",
        "yensign": "yen yuan",
        "crown": "kr sek krone dkk nok isk czk",
        "kr": "sek krone dkk nok isk",
        "krone": "dkk nok",
        "pound": "lb gbp",
        "ft": "huf",
    }.items()
}
"""Names that several units share, and these units: `$5` may be Canadian, `500 Ft` are forints or feet."""
NATIONS = {
    "us": "usd",
    "american": "usd",
    "canadian": "cad",
    "australian": "aud",
    "british": "gbp",
    "czech": "czk",
    "mexican": "mxn",
    "swedish": "sek",
    "danish": "dkk",
    "norwegian": "nok",
}
"""What a nation makes of a shared name: `Canadian dollars`."""
POWERS = ("平方", "立方", "제곱", "세제곱")
"""Square and cubic, written together with a unit."""
_SCALES = """
1000 हज़ार हजार ألف آلاف тысяча тысячи тысяч tausend
100000 लाख lakh لاکھ
1000000 مليون миллион миллиона миллионов millón millones milhão milhões millions millionen
10000000 करोड़ crore کروڑ
1000000000 مليار миллиард миллиарда миллиардов milliard milliards milliarde milliarden
"""
SCALES = {word: int(row.split()[0]) for row in _SCALES.strip().splitlines() for word in row.split()[1:]}
"""Scale words of other languages."""
PERCENT = (
    "(?:[Pp]rozent|por ciento|por cento|pour cent|per cento|процент(?:а|ов)?|प्रतिशत|بالمئة|بالمائة|في المئة|في المائة"
    "|درصد|パーセント|퍼센트)"
)

_NUMERALS = {
    **dict(zip("零〇一二三四五六七八九十百千万亿点负", "00123456789thkwy.-", strict=True)),
    **dict(zip("壹贰叁肆伍陆柒捌玖拾佰仟萬億點負两兩貳弐參参陸", "123456789thkwy.-2222336", strict=True)),
    **dict(zip("영일이삼사오육륙칠팔구십백천만억", "01234566789thkwy", strict=True)),
}
_FIGURES = str.maketrans(_NUMERALS)
_COUNTERS = (
    "个個元円圆块人名位只隻本张張条條次件枚匹冊回台頭頁页题題道步層层辆輛棵朵颗顆粒组組班双雙对對套份家间間"
    "개원명권마장번대"
)
"""Counters and currencies after a numeral; other words ("三角形", a triangle) do not count anything."""
_THOUSAND = "千(?![米克瓦卡焦帕赫])"  # not of a kilometre or a kilogram
_NUMERAL_AT_START = re.compile(
    rf"(?:(?:[0-9]+(?:\.[0-9]+)?|[{''.join(sorted(set(_NUMERALS) - set('千点點')))}]|{_THOUSAND}"
    rf"|[点點](?=[零〇一二三四五六七八九])|分之|分の| ?분의 ?|又| (?=[0-9일이삼사오육칠팔구]))){{1,60}}"
)
_MEASURES = frozenset(word for word in UNITS.replace("|", "\n").split() if FOREIGN_LETTER.match(word))
_DIVIDED = re.compile("分之|分の| ?분의 ?")
_SECTION = re.compile(
    r"(?:(?P<k>[1-9]?)k)?(?P<z1>0?)(?:(?P<h>[1-9]?)h)?(?P<z2>0?)(?:(?P<t>[1-9]?)t)?(?P<one>[1-9]?)"
)
_MIXED = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:[hk]?[wy]|[hk])){1,4}[0-9]{0,4}")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([hk]?[wy]?)")
_POWER = {
    "": 1,
    "h": 10**2,
    "k": 10**3,
    "w": 10**4,
    "hw": 10**6,
    "kw": 10**7,
    "y": 10**8,
    "hy": 10**10,
    "ky": 10**11,
}
SCALED = re.compile(
    rf"(?:[0-9]+(?:\.[0-9]+)?(?:[百千백천]?[万萬亿億만억]|{_THOUSAND}|[百백천]) ?){{1,4}}[0-9]{{0,4}}"
    r"|[0-9]+ ?(?:分之|分の|분의) ?[0-9]+"
)
"""Digits with Chinese, Japanese or Korean scale words: `3万5千`; and fractions: `3分之1`."""


def numeral_in_digits(text: str) -> str | None:
    """Write a Chinese, Japanese or Korean number, which a counter or unit may follow, in digits.

    Args:
        text: Stripped text: `四十二`, `一百二十元`, `3万5千`, `百分之五`, `三分之一`, `2分の1`, `사십이`.

    Returns:
        `42`, `120`, `35000`, `5%`, `1/3`, `1/2`, `42`, with the unit behind it if it is one of measurement; None for
        anything else. `一百二` is None: it is 120 in China and 102 in Japan.
    """
    match = _NUMERAL_AT_START.match(text[:80])
    if match is None or match.group().strip("0123456789. ") == "":
        return None
    rest = text[match.end() :].strip()
    is_measure = rest.removeprefix(POWERS[0]).removeprefix(POWERS[1]) in _MEASURES
    if rest and not is_measure and (rest[0] not in _COUNTERS or len(rest) > 8 or HEDGED.search(rest)):
        return None
    written = match.group().strip()
    if len(written) == 1 and "가" <= written <= "힣" and not rest:
        return None  # a syllable of its own is rarely a number
    number = _fraction(written)
    return None if number is None else f"{number} {rest}" if is_measure else number


def _fraction(text: str) -> str | None:
    parts = _DIVIDED.split(text)
    if len(parts) == 1:
        return _figure(text)
    whole, _, bottom = parts[0].rpartition("又")
    top = _figure(parts[1].strip())
    if len(parts) > 2 or top is None:
        return None
    if bottom == "百" and not whole:
        return f"{top}%"
    below = _figure(bottom.strip())
    above = _figure(whole) if whole else ""
    return None if below is None or above is None or "." in top + below else f"{above} {top}/{below}".strip()


def _figure(text: str) -> str | None:
    """Write one number without fractions in digits."""
    is_korean = any("가" <= character <= "힣" for character in text)
    has_digits = any(character in "0123456789" for character in text)
    figures = text.replace(" ", "").translate(_FIGURES)
    sign = "-" if figures.startswith("-") else ""
    figures = figures[len(sign) :]
    if not figures:
        return None
    if has_digits:
        return text if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text) else _mixed(figures, sign)
    whole, point, part = figures.partition(".")
    if point and not part.isdecimal():
        return None
    if whole.isdecimal():  # digit by digit, as years are: 二〇二四; two such digits may be "two or three"
        value = whole if len(whole) == 1 or len(whole) > 3 or "0" in whole else None
    else:
        value = _in_words(whole, is_korean)
    return None if value is None else f"{sign}{value}{point}{part}"


def _in_words(figures: str, is_korean: bool) -> str | None:
    """Add up `4t2` (42): sections of ten thousand, each of thousands, hundreds, tens and ones."""
    total, rest = 0, figures
    for mark, scale in (("y", 10**8), ("w", 10**4), ("", 1)):
        if mark and mark not in rest:
            continue
        section, _, rest = rest.partition(mark) if mark else (rest, "", "")
        if scale == 1 and not section:
            break
        match = _SECTION.fullmatch(section)
        if match is None:
            return None
        k, h, t = (int(match[name] or 1) if match[name] is not None else 0 for name in "kht")
        ones = int(match["one"] or 0)
        is_after = bool(h or k or total)
        if ones and is_after and not (t or is_korean or match["z2" if h else "z1"]):
            return None  # a last digit after hundreds or more, without a zero, is read in two ways
        # A zero stands for the powers that are left out between two others.
        if match["z1"] and not ((k or total) and not (k and h) and (h or t or ones)):
            return None
        if match["z2"] and not (h and ones and not t):
            return None
        value = k * 1000 + h * 100 + t * 10 + ones
        total += (value or 1 if not section else value) * scale
    return str(total)


def _mixed(figures: str, sign: str) -> str | None:
    """Add up `3w5k` (35000): digits with scale words."""
    if _MIXED.fullmatch(figures) is None:
        return None
    parts = [(number, scale) for number, scale in _PART.findall(figures) if number]
    powers = [_POWER[scale] for _, scale in parts]
    if any("." in number for number, _ in parts[1:]) or ("." in parts[0][0] and len(parts) > 1):
        return None
    for (number, _), power, above in zip(parts[1:], powers[1:], powers[:-1], strict=True):
        if int(number) * power >= above or (power == 1 and 10 ** len(number) != above):
            return None  # 3万5 is 35,000 to some and 30,005 to others
    whole, _, part = parts[0][0].partition(".")
    total = int(whole + part) * powers[0]
    if part:
        shift = 10 ** len(part)
        return f"{sign}{total // shift}" if total % shift == 0 else None
    return f"{sign}{total + sum(int(number) * power for (number, _), power in zip(parts[1:], powers[1:], strict=True))}"

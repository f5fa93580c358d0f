"""The verifier's lexicon: stop words, synonyms, antonyms, and words that name one of several alternatives.

English only. Questions in other languages are compared word by word, without stop words: fewer hits, not wrong ones.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


def _groups(text: str) -> list[list[str]]:
    """Separated by bars."""
    return [part.split() for part in text.split("|")]


NEGATIONS = frozenset(
    _words(
        "not no never none nothing nobody nowhere neither nor without cannot except unless hardly lack lacks lacking"
    )
)

OVERLOOKED = frozenset(
    _words(
        """a an the this that these those it its there here is are was were be been being am do does did doing done has
    have had having can could may might will would shall should must i me you we us they them he she one
    of for to in on at by with about as into from using use via and or so if then than please kindly just also
    tell show give suggest explain describe know want need like help let find get make me what which who whom whose
    how when where why say any some way ways exactly really actually currently properly quickly easily simply away
    happen happens come comes take takes thing things someone somebody people person possible okay ok allowed
    mean means stand stands consider considered count counts called hello hi hey thanks thank name live offer
    own item items step steps follow process your my our his her their"""
    )
)
"""Stop words: they form the question but carry no topic."""

DIRECTIONS = frozenset(_words("from into than over under before after by against onto above below"))
"""With these words, the order of names matters."""

_SAME = """
buy bought purchase | fix repair | delete remove erase | begin start commence | big large huge | biggest largest
| bigger larger | quick fast rapid | quickest fastest | faster quicker | car automobile auto | doctor physician
| movie film | picture photo photograph image | kid child | cost price fee charge | trip journey | create build
generate | error mistake | laptop notebook | phone telephone | author writer wrote write written | painter paint
painted | inventor invent invented | enhance improve better | mail email | change update modify edit alter |
reach contact touch | configure setup | enable activate | disable deactivate | ship deliver delivery shipping |
package parcel | reduce lower decrease cut | increase raise | refrigerator fridge | sofa couch | summary
summarise summarize sum | difference differ | recipe instruction | cause reason | combine merge join | quit exit
| accept take | pay payment | refund reimburse reimbursement | salary wage pay | apartment flat | wash clean |
vacation holiday | purpose goal | benefit advantage | drawback disadvantage downside | symptom sign | remedy
cure | required necessary | birthplace born birth | distance far | speed fast | height tall | age old | support
supported | convert turn transform | lorry truck | autumn fall | metre meter | litre liter | gramme gram |
kilometre kilometer km | kilogram kg kilo | pound lb | ounce oz | centimetre centimeter cm | millimetre
millimeter mm | mile mi | percent percentage | second sec | minute min | hour hr | gigabyte gb | megabyte mb |
terabyte tb | kilobyte kb | celsius centigrade | dollar usd | euro eur | degree deg | speak spoke spoken | drive
drove driven | eat ate eaten | choose chose chosen | break broke broken | steal stole stolen | grow grew grown |
draw drew drawn | send sent | spend spent | teach taught | catch caught | win won | lose lost | sell sold |
sleep slept | swim swam swum | fly flew flown
"""
SAME: dict[str, str] = {word: group[0] for group in reversed(_groups(_SAME)) for word in group}
"""The representative of each word's synonyms; the first group that contains a word counts."""

_OPPOSITE = """
enable disable | on off | in out | up down | open close | opened closed | open closed | buy sell | increase
decrease | rise fall | gain lose | win lose | more less | more fewer | most least | minimum maximum | min max |
first last | before after | above below | over under | cheap expensive | cheaper expensive | best worst | better
worse | good bad | big small | biggest smallest | bigger smaller | long short | longer shorter | longest
shortest | high low | highest lowest | higher lower | old new | older newer | oldest newest | old young | older
younger | oldest youngest | heavy light | heavier lighter | early late | earlier later | earliest latest | hot
cold | fast slow | faster slower | fastest slowest | hard easy | harder easier | hardest easiest | strong weak |
ascending descending | import export | upload download | encrypt decrypt | push pull | add remove | add delete |
include exclude | allow block | allow deny | accept reject | accept decline | success failure | succeed fail |
pass fail | legal illegal | safe dangerous | public private | mandatory optional | required optional | borrow
lend | employer employee | male female | credit debit | left right | north south | east west | buyer seller |
teacher student | parent child | mother father | husband wife | brother sister | king queen | yesterday today |
today tomorrow | yesterday tomorrow | last next | previous next | current previous | past future | morning
evening | morning night | day night | breakfast lunch | lunch dinner | breakfast dinner | spring autumn | summer
winter | daily weekly | weekly monthly | monthly yearly | daily monthly | day week | week month | month year |
hour day | minute hour | advantage disadvantage | benefit drawback | benefit risk | asset liability | income
expense | profit loss | input output | start stop | begin end | arrive depart | arrival departure | lock unlock
| raise lower | attack defend | question answer | front back | inside outside | indoor outdoor | single multiple
| gross net | wholesale retail | domestic international
"""
OPPOSITE: frozenset[frozenset[str]] = frozenset(map(frozenset, _groups(_OPPOSITE)))

_KINDS = """
monday tuesday wednesday thursday friday saturday sunday | january february march april may june july august
september october november december | red blue green yellow orange purple pink black white brown grey gray gold
silver | france germany spain italy portugal greece sweden norway denmark finland poland austria switzerland
belgium netherlands ireland england scotland wales britain uk usa america canada mexico brazil argentina chile
peru colombia china japan korea india pakistan russia ukraine turkey egypt nigeria kenya australia europe asia
africa | paris london berlin madrid rome vienna prague lisbon dublin oslo stockholm helsinki copenhagen warsaw
athens brussels amsterdam munich hamburg milan barcelona tokyo beijing shanghai delhi mumbai moscow cairo sydney
toronto chicago boston | english french german spanish italian portuguese dutch swedish norwegian danish finnish
polish russian ukrainian turkish arabic hebrew hindi chinese japanese korean greek latin | python java
javascript typescript ruby rust go golang c perl php swift kotlin scala haskell julia r matlab sql bash | mysql
postgres postgresql sqlite mongodb redis oracle cassandra clickhouse | windows linux macos mac ubuntu debian
fedora android ios iphone ipad | google apple microsoft amazon facebook meta netflix spotify twitter tesla ibm
intel nvidia samsung sony | toyota honda ford bmw audi mercedes volkswagen nissan hyundai | mercury venus earth
mars jupiter saturn uranus neptune pluto moon sun | hydrogen helium lithium carbon nitrogen oxygen iron copper
zinc lead tin aluminium aluminum mercury gold silver platinum ethanol methanol | cat dog horse cow pig sheep
goat chicken duck mouse rat rabbit hamster bird fish shark seal whale lion tiger bear wolf elephant | apple
banana orange lemon pear grape peach cherry strawberry tomato potato carrot onion garlic pepper basil mint |
rice pasta bread cake pizza soup salad beef pork chicken lamb salmon tuna steak cheese butter egg tea coffee
milk wine beer water juice | piano guitar violin cello flute drum trumpet | heart liver lung kidney brain
stomach knee shoulder elbow ankle hip hand foot | flu cold fever headache toothache measles cancer diabetes
asthma | meter foot inch yard mile kilometer centimeter millimeter gram kilogram pound ounce ton tonne liter
gallon pint cup teaspoon tablespoon celsius fahrenheit kelvin dollar euro yen second minute hour day week month
year byte kilobyte megabyte gigabyte terabyte mph kmh volt watt ampere | mother father brother sister son
daughter uncle aunt husband wife | vegan vegetarian halal kosher | car truck bus train plane bicycle bike
motorcycle boat ship | spring summer autumn winter | breakfast lunch dinner | football basketball tennis
baseball cricket hockey rugby golf chess checkers poker
"""
KINDS: tuple[frozenset[str], ...] = tuple(map(frozenset, _groups(_KINDS)))
"""Words that name one of several alternatives: two of them are never synonyms."""
ONE_OF_A_KIND = frozenset(word for kind in KINDS for word in kind)

NUMBER_WORDS = {
    word: str(value)
    for value, word in enumerate(
        _words(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen twenty"
        )
    )
} | {"thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "seventy": "70", "eighty": "80", "ninety": "90",
     "hundred": "100", "thousand": "1000", "million": "1000000", "billion": "1000000000", "dozen": "12", "half": "1/2",
     "quarter": "1/4", "once": "1x", "twice": "2x", "double": "2x", "triple": "3x"}  # fmt: skip
ORDINALS = {
    word: f"#{value}"
    for value, word in enumerate(_words("first second third fourth fifth sixth seventh eighth ninth tenth"), start=1)
}

FRAMES: tuple[tuple[str, str], ...] = (
    (r"\b(can|could|would|will) you (please )?(tell|explain|show|give|help)( to)?( me)?( with)?\b", " "),
    (r"\b(do|would) you (happen to )?know\b", " "),
    (r"\b(what is|what are|tell me|show me)? ?(the|a)? ?(best|easiest|right|simplest|proper|quickest)? ?"
     r"\b(way|ways|steps?|process|method|procedure)( do i (need to |have to )?follow)? (to|of|for)\b", " how "),
    (r"\bwhat (do|should|can|must) i (have to |need to )?do to\b", " how "),
    (r"\bi( would|'d)? (want|need|like|wish) to\b", " how "),
    (r"\bin (what|which) way\b", " how "),
    (r"\bis it (possible|okay|ok|fine|allowed) (for|to)\b", " is "),
    (r"\bwhat (is|was) the (reason|cause) (for|of|why|that)?\b", " why "),
    (r"\bwhat (causes|caused|makes|made)\b", " why "),
    (r"\bhow come\b", " why "),
    (r"\b(in|at|on|by)? ?(what|which) (time|year|date|day|month)\b", " when "),
    (r"\bby when\b", " when "),
    (r"\b(in|at)? ?(what|which) (place|location)\b", " where "),
    (r"\bhow many people (live|are)( there)? in\b", " population "),
    (r"\b(what is|what's) the number of\b", " how many "),
    (r"\bhow (many|much)\b", " quantity "),
    (r"\bhow (tall|high)\b", " height "),
    (r"\bhow old\b", " age "),
    (r"\bhow far( away)?\b", " distance "),
    (r"\bhow fast\b", " speed "),
    (r"\bhow long\b", " duration "),
    (r"\bhow (big|large)\b", " size "),
    (r"\bhow heavy\b", " weight "),
    (r"\bhow often\b", " frequency "),
    (r"\bhow (hot|cold|warm)\b", " temperature "),
    (r"\bhow deep\b", " depth "),
    (r"\bturn(ed|ing|s)? on\b|\bswitch(ed|ing|es)? on\b", " enable "),
    (r"\bturn(ed|ing|s)? off\b|\bswitch(ed|ing|es)? off\b", " disable "),
    (r"\bset(ting)? up\b", " setup "),
    (r"\bback(ing)? up\b", " backup "),
    (r"\blog(ging)? in\b|\bsign(ing)? in\b", " login "),
    (r"\bget in touch with\b", " contact "),
    (r"\bquantity (?=.*\bcost)", " what "),
)  # fmt: skip
"""Phrases and their plain words; applied in this order to lower-case text."""

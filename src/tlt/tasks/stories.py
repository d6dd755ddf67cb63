"""Word problems: a stock of things, people who bring and take some, and a question at the end.

`tell` writes a problem of any number of events and its worked solution. The question is terse. The
solution retells each event in other words, with how many things come or go and the count after it.
Every sentence is drawn from many phrasings with varying names, things and times, so texts rarely
repeat: the next words follow from the meaning, not from the last few words.

`gym` offers these problems as the task `word_problems`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

NAMES = """Alice Anna Ben Bella Carlos Carl Chris Clara Daniel David Diana Emma Eric Eva Frank Fred
George Grace Hannah Harry Helen Henry Ian Iris Jack James Jane John Julia Karen Kate Kevin Laura Leo
Lily Linda Lisa Lucas Lucy Maria Mark Martin Mary Max Mia Michael Mike Nina Noah Oliver Olivia Oscar
Paul Peter Rachel Rita Robert Rosa Ruth Sam Sara Simon Sofia Steve Susan Thomas Tim Tina Tom Victor
Wendy"""

ROLES = """baker teacher nurse driver farmer doctor student gardener neighbor guest tourist painter
singer coach cook clerk pilot sailor lawyer judge writer dancer hunter soldier priest plumber
reporter scientist librarian mechanic"""

STOCKS = {
    "bakery": "rolls muffins pies cakes cookies bagels",
    "library": "books maps magazines novels comics dictionaries",
    "farm": "eggs pumpkins apples melons potatoes onions",
    "school": "pencils chairs notebooks balls brushes rulers",
    "garage": "tires boxes bolts lamps tools cables",
    "shop": "shirts hats toys candles bottles cups",
    "museum": "coins stamps vases photos masks paintings",
    "kitchen": "plates spoons bowls glasses lemons carrots",
    "camp": "tents blankets torches ropes bags sticks",
    "office": "pens folders envelopes phones cards screens",
    "garden": "roses tulips pots seeds stones pears",
    "harbor": "fish nets shells crates flags lobsters",
}

TIMES = """On Monday|On Tuesday|On Friday|On Sunday|At noon|In the evening|At nine|A day later
Soon after|That week|At dawn|The same night|Next|Then|Later|Once more|Meanwhile|An hour later
In the afternoon|By chance""".replace("\n", "|").split("|")

OPENINGS = (
    "The {place} [has|owns|keeps|stores] {n} {things}.",
    "There are {n} {things} [in|at] the {place}.",
    "{n} {things} [lie|wait] [in|at] the {place}.",
)

QUESTIONS = (
    "How many {things} are [there now|left|there in the end]?",
    "How many {things} does the {place} have [now|in the end]?",
)

TOLD = {
    1: ("{who} [brought|added|delivered|returned] {n}.",),
    -1: ("{who} [took|bought|borrowed|used] {n}.",),
}

LEADS = (
    "[|||||Then |Next, |Now |Well, |So |Again, |Here |Okay, |Still, |Of course |{time} |{time} |"
    "We read that |As told, |It says that |Clearly, ]"
)

HOW = (
    "[||||kindly |quickly |slowly |gladly |also |soon |really |simply |just |quietly |finally |"
    "happily |suddenly |carefully |again |then ]"
)

KIND = (
    "[||||nice |good |old |new |small |large |heavy |cheap |fine |fresh |clean |pretty |dusty |"
    "lovely |strange |plain |round |bright |dark ]"
)

WORKED = {
    1: (
        LEADS + "{who} " + HOW + "[brings|adds|gives|offers|provides|leaves|sends] {n}"
        "[ " + KIND + "{things}| more| extra|][, so|, and|, which means|;|:] "
        "[we|they|people|all] [have|get|reach|count|hold|see] {b}[| now| in total| {things}].",
        "[With|Thanks to|Counting|Given|Including] {who}'s {n} [" + KIND + "{things}|more]"
        "[, the| the] [total|sum|count|stock|number|pile] "
        + HOW
        + "[rises|grows|climbs|moves] to {b}.",
        "[Adding|Putting|Counting] the {n} that {who} "
        + HOW
        + "[brought|gave|had|left] [to|onto] {a} [makes|gives|is|yields] {b}[| {things}| in all].",
        "{a} [and|plus|with|+] {n} [from|by|thanks to] {who} "
        "[is|makes|are|gives|means] {b}[| " + KIND + "{things}| now].",
        "[The {place}|It|The stock|Our count] " + HOW + "[gains|receives|wins|gets|earns] {n} "
        "[from|thanks to|because of] {who}[, so|, and|, thus|:] "
        "{a} [turns into|becomes|is now] {b}.",
        "{time}, {who} " + HOW + "[raises|lifts|increases|moves] "
        "[it|the count|the total|that|everything] by {n} [to|up to] {b}.",
        LEADS + "another {n} " + KIND + "{things} [come|arrive|are due] "
        "[from|thanks to|because of] {who}[, so|, and|:] {b} [are|lie|stand|remain] there.",
    ),
    -1: (
        LEADS + "{who} " + HOW + "[takes|removes|claims|grabs|wants|gets|needs] {n}"
        "[ " + KIND + "{things}| away| of these|][, so|, and|, which means|;|:] "
        "[we|they|people|all] [have|keep|hold|count|save|see] {b}[| now| in the end| {things}].",
        "[Without|Minus|Losing|Given|After] {who}'s {n} [" + KIND + "{things}|fewer]"
        "[, the| the] [total|rest|count|stock|number|pile] "
        + HOW
        + "[falls|drops|sinks|moves] to {b}.",
        "[Taking|Subtracting|Removing] the {n} that {who} "
        + HOW
        + "[took|got|had|chose] [from|off] {a} [leaves|gives|is|yields] {b}[| {things}| in all].",
        "{a} [minus|less|without|-] {n} [for|by|because of] {who} "
        "[is|leaves|are|gives|means] {b}[| " + KIND + "{things}| now].",
        "[The {place}|It|The stock|Our count] " + HOW + "[loses|sheds|misses|drops|gives] {n} "
        "[with|to|because of] {who}[, so|, and|, thus|:] {a} [turns into|becomes|is now] {b}.",
        "{time}, {who} " + HOW + "[lowers|cuts|reduces|brings] "
        "[it|the count|the total|that|everything] by {n} [to|down to] {b}.",
        LEADS + "exactly {n} " + KIND + "{things} [go|leave|are lost] "
        "[with|thanks to|because of] {who}[, so|, and|:] {b} [are|lie|stand|remain] there.",
    ),
}

CHECKS = (
    "[Let me check|Let us check|We check|I check|Better check] [this|that|it|everything] "
    "[again|once more|to be sure]: [at first|first|in the beginning] {n} {things}.",
    "[Wait|Hold on|Hmm|One moment], [again|once more|from the start]: "
    "[it began|we began] with {n}.",
    "[To be sure|For safety|As a test], [count again|go back|start over] from {n}.",
)

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True, slots=True)
class Story:
    question: str
    worked: str
    """The solution in words, without the answer in tags."""
    answer: int
    first: int
    """Things in stock at the beginning."""
    changes: tuple[int, ...]
    """What each event brings, below 0 what it takes."""


def tell(
    num_events: int,
    rng: random.Random,
    max_change: int = 3,
    max_total: int = 9,
    check_share: float = 0.3,
) -> Story:
    """Return a problem of `num_events` events, with its solution.

    An event brings or takes up to `max_change` things; the stock stays within 0 and `max_total`.
    The solution checks itself with the chance `check_share`: it retells all events in new words. A
    check may be checked again, so solutions of the same problem differ in length.
    """
    place = rng.choice(list(STOCKS))
    things = rng.choice(STOCKS[place].split())
    fixed = {"place": place, "things": things}
    first = total = rng.randint(max_total // 4, 3 * max_total // 4)
    asked = [_phrase(rng, OPENINGS, fixed | {"n": str(total)})]
    events = []
    for _ in range(num_events):
        sign = rng.choice((1, -1))
        change = rng.randint(1, max_change)
        if not 0 <= total + sign * change <= max_total:
            sign = -sign
        event = fixed | {
            "n": str(change),
            "a": str(total),
            "b": str(total + sign * change),
            "who": _someone(rng),
        }
        asked.append(_phrase(rng, TOLD[sign], event))
        events.append((sign, event))
        total += sign * change
    asked.append(_phrase(rng, QUESTIONS, fixed))
    worked = [_retold(rng, events)]
    while rng.random() < check_share:
        worked += [_phrase(rng, CHECKS, fixed | {"n": str(first)}), _retold(rng, events)]
    changes = tuple(sign * int(event["n"]) for sign, event in events)
    return Story(" ".join(asked), " ".join(worked), total, first, changes)


def texts(count: int, seed: int = 0) -> Iterator[str]:
    """Yield problems with their solutions as plain text, to train a tokenizer on."""
    rng = random.Random(seed)
    for _ in range(count):
        story = tell(rng.randint(1, 6), rng)
        yield f"{story.question}\n{story.worked}\n<answer>{story.answer}</answer>"


def _retold(rng: random.Random, events: list[tuple[int, dict[str, str]]]) -> str:
    return " ".join(
        _phrase(rng, WORKED[sign], event | {"time": rng.choice(TIMES)}) for sign, event in events
    )


def _someone(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(NAMES.split())
    return f"{rng.choice(('the', 'a'))} {rng.choice(ROLES.split())}"


def _phrase(rng: random.Random, templates: tuple[str, ...], words: dict[str, str]) -> str:
    """Return one of the templates, with one of each `[a|b]` and the words for each `{word}`."""
    text = rng.choice(templates)
    while found := _CHOICE.search(text):
        text = text[: found.start()] + rng.choice(found[1].split("|")) + text[found.end() :]
    text = text.format(**words)
    return text[0].upper() + text[1:]

"""Write demo.parquet, the prompts of `+job=demo`: python conf/prompts/make_demo.py

All texts were written for this project. Four rows are bad on purpose, so that the demo shows what a bad row gets.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("kind", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("max_new_tokens", pa.int32()),
        ("temperature", pa.float64()),
        ("n", pa.int32()),
        ("stop", pa.list_(pa.string())),
        ("seed", pa.int64()),
    ]
)

PASSAGES = {
    "ferry": """
        The night ferry from Harwick to Lundsay leaves at 21:40 from pier four. Passengers on foot board through the glass
        hall from 20:15, cars queue in lanes three to six and must arrive no later than 20:45. The crossing takes nine hours
        and ten minutes in calm weather. Cabins on deck seven have a window, cabins on deck five do not. Dinner is served in
        the Gull Room until 23:30 and breakfast from 05:45. Dogs travel in the heated kennel on deck three and may be
        visited every two hours. In the winter of last year the ferry was cancelled eleven times because of ice in the
        harbour mouth. Tickets for a cancelled crossing stay valid for sixty days.""",
    "bees": """
        Marta Olsen keeps forty hives on the slope behind the old brickworks. In April she counts the brood frames and
        writes the number of each hive on a slate by the door. Hive twelve is always the strongest and hive thirty the
        weakest. She feeds no sugar before the willow has flowered, because the first pollen tells the queen to lay. The
        main harvest comes in the second week of July, when the lime trees are in bloom, and a second, darker honey follows
        in late August. Last year the forty hives gave six hundred and ten kilograms. Marta sells half of it at the Saturday
        market in Brennfeld and the other half to a bakery that makes gingerbread. The wax goes to her cousin Piet, who
        pours candles.""",
    "bridge": """
        The stone bridge at Ulmen was built between 1784 and 1791 by the master mason Johann Reuter. It has seven arches,
        each eleven metres wide, and rests on piers of grey basalt. During the flood of 1845 the two middle arches fell into
        the river; they were rebuilt in brick within three years, and the difference in colour can still be seen. A toll of
        two pennies a cart was taken until 1869. In 1932 the council wanted to replace the bridge with a steel one, but the
        money ran out before the first pier stood. Since 1978 the bridge has been closed to cars. Today about four thousand
        people cross it on foot or by bicycle every day.""",
    "telescope": """
        The Kestrel telescope stands at 2,640 metres on the dry plateau of Arrano. Its mirror is 3.2 metres wide and is
        cooled at noon so that it has the temperature of the night air when the dome opens. A night assistant and one
        astronomer are enough to run it. Every image is copied to two disks in the building and to an archive in the valley
        before the next exposure begins. In its first year Kestrel found fourteen small asteroids and one comet, which was
        named after the cook, Ines Duarte, because she had seen it first on the screen in the kitchen. Clouds cost the
        observatory fifty-eight nights a year, dust storms another nine.""",
    "clinic": """
        From the first of March the village clinic in Tarn opens at seven on Mondays and Thursdays and at nine on all other
        weekdays. Blood samples are taken until ten; please drink water but do not eat before. Doctor Amari sees children on
        Tuesday afternoons, Doctor Lind sees patients with diabetes on Wednesday mornings. Prescriptions that have been
        ordered by telephone can be collected from the green box at the side entrance after four. The clinic does not keep
        vaccines for travellers; these are given in the hospital at Oster, room 118. On public holidays the nurse on duty
        can be reached at extension 44. Anyone who cannot keep an appointment should cancel it one day before.""",
    "recipe": """
        For the barley soup you need two hundred grams of pearl barley, three carrots, one leek, two sticks of celery and a
        litre and a half of stock. Rinse the barley until the water stays clear. Soften the vegetables in a spoon of butter
        for eight minutes without letting them brown. Add the barley, stir it once, and pour in the hot stock. Let the soup
        simmer for forty minutes with the lid half open. Stir from time to time, because barley likes to stick to the pot.
        Salt goes in only at the end, since the stock becomes stronger as it cooks. Serve with chopped parsley and a slice
        of rye bread. The soup tastes better on the second day.""",
    "library": """
        The town library of Velde lends books, films, games, tools and since last autumn also musical instruments. A card
        costs twelve euros a year and is free for anyone under eighteen. Books may be kept for four weeks, films for one
        week, instruments for three months. Each of these periods can be extended twice, unless somebody else is waiting. A
        book that comes back late costs twenty cents a day, but never more than five euros. The reading room on the second
        floor is silent; on the ground floor people may talk. The most borrowed book of last year was a guide to mushrooms,
        the most borrowed tool a drill. The library is closed on Mondays.""",
    "garden": """
        When the school in Hallin tore up its car park, the pupils were asked what should take its place. Most wanted a
        football pitch, some a pond, and the youngest class wanted goats. In the end the school planted an orchard of
        thirty-six apple trees, one for each class that had ever left the school. The trees are looked after by a group that
        meets on Fridays. They water in summer, prune in February, and keep a diary with the weight of the harvest. In the
        fourth year the trees gave nine hundred kilograms, far more than the kitchen could use, so the pupils learned to
        press juice and sold it at the spring fair. The money bought two beehives and, at last, three goats.""",
    "router": """
        The model R20 has four network sockets at the back and one at the side. The side socket is for the modem and must
        not be used for a computer. When the lamp is green the device is ready, when it blinks green it is starting, and
        when it is red there is no connection. To go back to the factory settings, press the small button under the device
        for ten seconds with a paper clip. After that the name of the network is R20-HOME and the password is the serial
        number without the dashes. New firmware is searched for every night at three. The device may become warm, but it
        must not be covered. The guarantee lasts thirty-six months from the date on the bill.""",
    "expedition": """
        Nora Feld and her two companions left the hut at Skarn before dawn on the third of May. They pulled one sledge with
        sixty kilograms of food and another with the tent, the stove and the radio. On the first day they made fourteen
        kilometres, on the second, in deep new snow, only five. The fourth day brought a storm, and they stayed in the tent
        and played chess with figures cut from carrots. On the eighth day the stove broke; Feld repaired it with wire from
        the radio's handle. They reached the weather station at Cape Loren on the eleventh day, two days later than planned,
        with food left for one supper. The station cook had baked a cake for them, and then another, since they had eaten
        the first before he could cut it.""",
}

EXTRACTION = [
    ("ferry", "Copy, word for word, every sentence that contains a time of day."),
    ("ferry", "Quote the sentences about dogs and about cancelled crossings exactly as they stand."),
    ("bees", "Quote exactly the two sentences that say what Marta does with the honey and the wax."),
    ("bees", "Copy every sentence that contains a number. Do not change a word."),
    ("bridge", "List each year in the text together with the sentence it stands in, quoted exactly."),
    ("bridge", "Copy the sentence about the flood and the sentence about the council, word for word."),
    ("telescope", "Quote the sentences that mention the mirror, the comet and the clouds."),
    ("telescope", "Copy the first three sentences of the text exactly."),
    ("clinic", "Copy every sentence that tells patients what to do or not to do."),
    ("clinic", "Quote the sentences that name a doctor, word for word."),
    ("recipe", "Copy the ingredients sentence and then every sentence that says how long something takes."),
    ("library", "Quote every sentence that names a price."),
    ("library", "Copy the last four sentences of the text exactly as they stand."),
    ("router", "Quote the sentences that explain the lamp and the factory settings."),
]

SUMMARY = [
    ("garden", "Summarise the text in two sentences."),
    ("garden", "What happened to the car park? Answer in three short sentences that use only the text."),
    ("expedition", "Summarise the journey in three sentences."),
    ("expedition", "Write a headline of at most ten words and one sentence below it for this report."),
    ("ferry", "Summarise for a passenger on foot what matters before departure."),
    ("bridge", "Tell the history of the bridge in two sentences."),
    ("router", "Explain in three sentences how to use this device."),
    ("library", "Summarise the rules of the library in plain words."),
]

# What is asked, then the code.
CODE_EDIT = [
    (
        "Rename the parameter w to width and h to height.",
        """
        def area(w, h):
            if w < 0 or h < 0:
                raise ValueError('negative side')
            return w * h""",
    ),
    (
        "Return 0.0 when values is empty. Change nothing else.",
        """
        def mean(values):
            total = 0
            for value in values:
                total += value
            return total / len(values)""",
    ),
    (
        "Make it count words without regard to upper and lower case.",
        """
        def count_words(text):
            counts = {}
            for word in text.split():
                counts[word] = counts.get(word, 0) + 1
            return counts""",
    ),
    (
        "Use a with statement to open the file.",
        """
        def read_lines(path):
            file = open(path)
            lines = file.read().splitlines()
            file.close()
            return lines""",
    ),
    (
        "Turn it into a function smallest that returns the smallest number.",
        """
        def largest(numbers):
            best = numbers[0]
            for number in numbers:
                if number > best:
                    best = number
            return best""",
    ),
    (
        "Use an f-string for the message.",
        """
        def greet(name):
            message = 'Hello, ' + name + '!'
            print(message)
            return message""",
    ),
    (
        "Add a docstring that says what the function returns.",
        """
        def is_prime(n):
            if n < 2:
                return False
            for d in range(2, n):
                if n % d == 0:
                    return False
            return True""",
    ),
    (
        "Add type hints for float arguments and a float result.",
        """
        def clamp(value, low, high):
            if value < low:
                return low
            if value > high:
                return high
            return value""",
    ),
    (
        "Rename the function to flip_words and the parameter to text.",
        """
        def reverse_words(sentence):
            words = sentence.split(' ')
            words.reverse()
            return ' '.join(words)""",
    ),
    (
        "Print 'miss' before the value is loaded.",
        """
        def fetch(cache, key, load):
            if key not in cache:
                cache[key] = load(key)
            return cache[key]""",
    ),
    (
        "Round the result to one decimal place.",
        """
        def to_celsius(f):
            c = (f - 32) * 5 / 9
            return c""",
    ),
    (
        "Leave out items that are None.",
        """
        def flatten(rows):
            result = []
            for row in rows:
                for item in row:
                    result.append(item)
            return result""",
    ),
    (
        "Raise a ValueError when exponent is negative.",
        """
        def power(base, exponent):
            result = 1
            for _ in range(exponent):
                result *= base
            return result""",
    ),
    (
        "Add a method reset that sets value to 0.",
        """
        class Counter:
            def __init__(self):
                self.value = 0

            def add(self, step):
                self.value += step
                return self.value""",
    ),
]

QUESTION = [
    "Why does ice float on water?",
    "What is the difference between weather and climate?",
    "How does a bicycle stay upright when it moves?",
    "Why do leaves change their colour in autumn?",
    "What does a compiler do?",
    "Why do we see lightning before we hear thunder?",
    "What is the capital of France, and which river runs through it?",
    "How does soap remove grease?",
    "What happens to bread dough when it rises?",
    "Why is the sea salty?",
    "What is a prime number? Give three examples.",
    "How does a vaccine help the body?",
]

LISTS = [
    "List five things to pack for a day of hiking. One line each.",
    "List the planets of the solar system in order from the sun.",
    "Give me six ideas for a rainy afternoon with two children.",
    "Name seven vegetables that can be eaten raw.",
    "List four advantages and four disadvantages of living in a big city.",
    "Name the days of the week, one on each line, each with one thing to do on it.",
    "List five questions that a good job interview should contain.",
    "Give the twelve months with the number of days each of them has.",
]

REWRITE = [
    "Rewrite this more politely: Send me the report today, I have waited long enough.",
    "Rewrite in the past tense: The train leaves the station, and the children wave until it disappears behind the hill.",
    "Make this sentence shorter: Due to the fact that it was raining, we came to the decision that we would not go outside.",
    "Rewrite as one question: I would like to know the opening hours. I mean those of the museum. On Sundays.",
    "Turn this note into a friendly email: meeting moved to Thursday, room 12, bring the drawings.",
    "Rewrite without the word very: The very old man was very tired after the very long walk.",
]

MULTI_TURN: list[list[str]] = [
    ["I want to learn to cook.", "Good idea! What do you like to eat?", "Mostly soups. Which one should I begin with?"],
    ["Give me a name for a grey cat.", "How about Pebble?", "I like it. Now one for her brother, who is orange."],
    ["What is 12 times 12?", "12 times 12 is 144.", "And if I take away 44?"],
    ["Recommend a sport for someone who dislikes running.", "Swimming would be a good choice.",
     "I have no pool nearby. Something else?"],
    ["Tell me a fact about owls.", "An owl can turn its head by about 270 degrees.", "Why does it need to do that?",
     "Its eyes cannot move in their sockets.", "Do other birds have the same problem?"],
    ["Write a first sentence for a story about a lighthouse.", "The lamp had been dark for a year when the letter came.",
     "Write the next two sentences."],
    ["Correct my sentence: He go to school yesterday.", "He went to school yesterday.", "Explain the mistake."],
    ["My plant has yellow leaves.", "How often do you water it?", "Every day, about a glass."],
]  # fmt: skip


def row(kind: str, number: int, messages: list[dict[str, str]] | None, **values: Any) -> dict[str, Any]:
    return {"id": f"{kind}-{number:02d}", "kind": kind, "messages": messages, **values}


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def about(passage: str, task: str) -> list[dict[str, str]]:
    return ask(f"{task}\n\nText:\n{' '.join(PASSAGES[passage].split())}")


def edit(task: str, code: str) -> list[dict[str, str]]:
    return ask(f"{task} Return the whole code and nothing else.\n\n```python\n{textwrap.dedent(code).strip()}\n```")


def rows() -> list[dict[str, Any]]:
    """70 good rows, kinds mixed, and 4 bad ones at fixed places among them."""
    kinds = [
        [row("question", i, ask(text)) for i, text in enumerate(QUESTION)],
        [row("extraction", i, about(*item), max_new_tokens=160) for i, item in enumerate(EXTRACTION)],
        [row("code_edit", i, edit(*item)) for i, item in enumerate(CODE_EDIT)],
        [row("summary", i, about(*item)) for i, item in enumerate(SUMMARY)],
        [row("list", i, ask(text)) for i, text in enumerate(LISTS)],
        [row("multi_turn", i, [{"role": ("user", "assistant")[j % 2], "content": text} for j, text in enumerate(turns)])
         for i, turns in enumerate(MULTI_TURN)],
        [row("rewrite", i, ask(text), max_new_tokens=48) for i, text in enumerate(REWRITE)],
    ]  # fmt: skip
    good = [kind[place] for place in range(max(map(len, kinds))) for kind in kinds if place < len(kind)]
    own_values: dict[str, dict[str, Any]] = {
        "question-02": {"temperature": 0.7, "n": 2},
        "question-06": {"max_new_tokens": 32, "stop": [",", "."]},
        "question-09": {"temperature": 0.8, "seed": 11},
        "list-00": {"stop": ["6."]},
        "list-02": {"temperature": 0.9, "n": 3, "seed": 2026},
        "list-05": {"max_new_tokens": 160, "stop": ["Sunday"]},
        "multi_turn-01": {"temperature": 0.7, "n": 3, "max_new_tokens": 40},
        "multi_turn-05": {"temperature": 0.8, "n": 2, "seed": 7},
        "summary-03": {"max_new_tokens": 48, "stop": ["\n\n\n"]},
        "rewrite-04": {"temperature": 0.6, "max_new_tokens": 80},
    }
    for item in good:
        item.update(own_values.get(item["id"], {}))
    shelves = [f"Shelf {i} holds {i * 7 % 90 + 3} boxes of nails and {i * 13 % 50 + 1} boxes of screws." for i in range(140)]
    inventory = " ".join(shelves)
    bad = {
        9: row("bad", 0, []),
        24: row("bad", 1, None),
        41: row("bad", 2, ask("How tall is a giraffe?"), temperature=-1.0),
        60: row("bad", 3, ask(f"Which shelf holds the most nails?\n\n{inventory}")),
    }
    for place, item in bad.items():
        good.insert(place, item)
    return good


def table() -> pa.Table:
    return pa.Table.from_pylist(rows(), SCHEMA)


if __name__ == "__main__":
    path = Path(__file__).with_name("demo.parquet")
    pq.write_table(table(), path, compression="zstd")
    print(f"{path}: {table().num_rows} rows")

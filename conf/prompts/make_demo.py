"""Write demo.parquet, the prompts of `+job=demo`: python conf/prompts/make_demo.py

All texts were written for this project. Four rows are bad on purpose, so that the demo shows what a bad row gets.
"""

from __future__ import annotations

import re
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
    "bridge": """
        The stone bridge at Ulmen was built between 1784 and 1791 by the master mason Johann Reuter. It has seven arches,
        each eleven metres wide, and rests on piers of grey basalt. During the flood of 1845 the two middle arches fell into
        the river; they were rebuilt in brick within three years, and the difference in colour can still be seen. A toll of
        two pennies a cart was taken until 1869. In 1932 the council wanted to replace the bridge with a steel one, but the
        money ran out before the first pier stood. Since 1978 the bridge has been closed to cars. Today about four thousand
        people cross it on foot or by bicycle every day.""",
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

# An indented line continues the line before it.
DOCUMENTS = {
    "harbour": """
        North mole opens again
        The north mole of Harwick was opened to the public again on Saturday, eleven months after the storm that broke
            its railing and carried away the small green light at its end. About two hundred people walked out to the new
            light in the rain.
        "We did not want to build the same mole twice," said the harbour master, Edda Brandt. "The old wall was straight,
            and a straight wall throws the wave back at the boats. The new one is curved at the foot, so the water runs up,
            turns over and falls on itself. We tried it last winter with a model in a swimming pool, and my daughter
            pulled a board through the water to make the waves. It looked like a game, but the engineers measured
            everything. I am proud that nobody was hurt in all these months, and that we needed only one week more than we
            had promised. The fishing boats can come back to their old places on Monday. The yachts will have to wait until
            the divers have taken the last stones out of the channel, and that depends on the weather."
        The work cost 2.4 million, most of it paid by the state. A brass band played, and the bakery gave away buns in the
            shape of an anchor.""",
    "night_log": """
        Log of the cold store, Sunday to Monday
        21:50 Shift handed over from Iversen to Pohl, all doors closed.
        22:15 Hall 1 at minus 21 degrees, hall 2 at minus 19 degrees.
        22:40 Truck from Lundsay unloaded, 18 pallets of peas into hall 2.
        23:05 Door of hall 2 did not close, ice removed from the rail.
        23:20 Door of hall 2 closed, temperature minus 14 degrees.
        23:55 Hall 2 back at minus 18 degrees.
        00:30 Compressor 3 reports high pressure, fan cleaned by hand.
        01:10 Compressor 3 runs normally, pressure 11 bar.
        02:00 Round through all halls, one lamp broken in hall 4.
        02:45 Driver from Velde arrived early and was sent to the canteen.
        03:30 Truck to Velde loaded, 22 pallets of fish from hall 1.
        04:15 Smoke alarm in the office, caused by a toaster, no damage.
        05:00 Hall 1 at minus 21 degrees, hall 2 at minus 20 degrees.
        05:45 Shift handed over from Pohl to Iversen, lamp ordered.""",
    "boat_hire": """
        Boats on Lake Morven, prices from May to September
        Please bring the boat back ten minutes before your time is over, dry and without apple cores.

        Rowing and paddling
        - Rowing boat for three people: 9 euros an hour, 30 euros a day
        - Rowing boat for five people: 12 euros an hour, 40 euros a day
        - Canoe with two paddles: 10 euros an hour, 34 euros a day
        - Kayak with spray cover: 8 euros an hour, 28 euros a day
        - Paddle board with leash: 7 euros an hour, 22 euros a day

        Sailing
        - Dinghy for two people: 18 euros an hour, 65 euros a day
        - Keel boat for four people: 32 euros an hour, 120 euros a day
        - Lesson with a teacher: 45 euros an hour, only before noon

        Extras
        - Life jacket: free, and children have to wear it
        - Dry bag of twenty litres: 2 euros a day
        - Picnic basket for two: 24 euros, to be ordered the evening before
        - Fishing licence: 11 euros a day, not for the northern bay

        Dogs sail for free. Whoever falls in gets a hot chocolate.""",
    "grinder": """
        Hand mill M4, instructions
        Thank you for choosing the M4. Read this page once and keep it in the kitchen drawer.

        Setting up
        Screw the clamp to the edge of a table that is between two and five centimetres thick. Put the crank on the axle so
            that the flat sides meet, and tighten the nut with your fingers only.

        Grinding
        Turn the ring under the hopper to the left for a coarse powder and to the right for a fine one. Never turn it
            while there are beans between the stones. Fill in no more than forty grams and turn the crank slowly; a hot
            stone spoils the taste. If the crank gets stuck, turn it back half a round and look for a pebble.

        Cleaning
        Brush the stones after every use. Once a month, grind a handful of dry rice and throw the flour away. The hopper and
            the drawer may be washed with warm water, but the stones must never get wet, because the axle would rust.

        Storing
        Open the ring by one full turn before you put the mill away, so that the spring can rest. Keep it in a dry place and
            do not hang it up by the crank.""",
    "minutes": """
        Minutes of the house meeting, Alder Street 14, on the ninth of February
        Present: nineteen of twenty-four households. Chair: Ms Okafor. Minutes: Mr Lindqvist.
        1. The minutes of the last meeting were accepted without changes.
        2. The lift will be repaired in the second week of March. During these days the company places a chair on every
            landing, and Mr Haas on the first floor takes in parcels for everyone above the third.
        3. The cellar was under water twice in January. A plumber has found a crack in the drain below the bicycle room. The
            repair costs 3,800 euros and was approved with seventeen votes to two.
        4. Ms Petrova asked for a quiet hour between one and two in the afternoon. After a long discussion it was agreed to
            ask for quiet in the yard only, and to hang a friendly sign next to the sandpit.
        5. The roof terrace may be used until ten in the evening. The key hangs in the caretaker's office and has to be
            signed for. Grilling stays forbidden, as the insurance does not pay for it.
        6. The summer party takes place on the last Saturday of June. The families on the second floor bring the tables.
        The next meeting is on the eleventh of May.""",
    "letter": """
        Dear Ms Hollis,

        We moved into the flat above the chemist's shop on the first of August, and we like it very much. There are,
            however, three things that we could not mend ourselves, and I promised on the telephone to write them down.

        The first is the kitchen window. It closes only if one person pushes from inside while another pulls from the
            balcony, and when the wind comes from the west it opens again by itself. In September that was pleasant. Now it
            is not.

        The second is the heating in the small bedroom. It either does nothing or makes the room as hot as a bakery, and it
            knocks at half past four every morning. My son says that it is a ghost, and he has given it a name, but he
            would still prefer to sleep.

        The third is the bell at the street door, which rings in the flat of our neighbour, Mr Quist. He is ninety-one, he
            climbs down the stairs for every one of our parcels, and he refuses to be thanked.

        We are at home on weekdays after five and all day on Saturdays. Anyone who comes to repair something gets coffee
            and plum cake.

        Yours sincerely,
        Tomas and Irma Weller""",
    "tuner": """
        A visit to the piano tuner
        Question: Mr Adeyemi, how many pianos do you tune in a year?
        Answer: About four hundred. A hundred of them belong to schools, and those are the ones that need me most.
            Children do not play wrong notes, they play hard ones, and after one winter every string has moved.
        Question: Do you use a machine?
        Answer: I carry one in my bag for the first note of the day. After that I listen. Two strings that are not quite
            equal make a slow wave in the air, and I turn the pin until the wave stands still. No machine hears that better
            than somebody who has waited for it all his life.
        Question: What was your hardest job?
        Answer: A concert grand on a river boat. The piano was perfect when we left and terrible when we arrived, because
            the air had become so damp. I tuned it four times in one day, the last time during the speech of the mayor,
            with a felt strip between the strings so that nobody would notice.
        Question: And who tunes the piano in your own home?
        Answer: Nobody. It belonged to my aunt, it is out of tune in a way that I have known since I was six, and I would
            not change it for anything.""",
    "clockmaker": """
        In the town of Ebben there was a clock that had not struck for a hundred years, and nobody missed it. People rose
            when the baker's chimney smoked and went to bed when the last dog was quiet.

        One autumn a young clockmaker named Sela took the room under the tower, because it was the cheapest in the town. She
            could not sleep below a clock that stood still. So she climbed up with a lamp and a can of oil, took out one
            wheel after the other, and laid them on the floor in the order in which she found them. Between the ninth and
            the tenth wheel sat a nest, and in the nest sat a jackdaw, who looked at her as if she had come too late.

        Sela thought about it for three days. On the fourth she built a little wooden bridge that carried the great axle
            around the nest, and she made a tenth wheel with fewer teeth, so that the clock would run slowly on that side.
            At noon it struck for the first time, and the whole market fell silent. The jackdaw did not even turn her head.

        Since then the clock of Ebben has been late by eleven minutes every spring. Nobody has ever asked for it to be
            mended.""",
    "release_notes": """
        Fieldbook 3.2, released on the fourteenth of October
        This version brings maps without a network and mends what users reported over the summer. Notes written with
            version 2 can still be opened.

        New
        - Maps can be saved for a whole region and used without a network.
        - A photo can be turned and cropped before it is added to a note.

        Fixed
        - The list of plants no longer jumps to the top when a note is closed.
        - Dates before 1970 are shown with the right day of the week.
        - A note with more than forty photos can be exported again.
        - The search finds names with a hyphen, such as lady's-mantle.
        - Heights below sea level are no longer shown as zero.
        - The app does not ask for the camera when only text is entered.
        - Two notes with the same title do not replace each other any more.
        - The compass turns the right way on tablets held upside down.
        - Printing a table no longer leaves out its last line.

        Known problems
        - On very old phones the first start can take up to a minute.""",
    "hut_walk": """
        From hut to hut in the Sarn valley, four days
        Day one leads from the station at Brennfeld through a beech wood to the Linden hut. The path is easy and well marked,
            and the only water is a spring behind the chapel. Walking time four hours, climb six hundred metres.
        Day two crosses the Grey Saddle. Start before seven, because storms tend to come in the afternoon, and keep to the
            left of the snow field, which often lasts until July. From the saddle you can see the lake at Arrano and, on
            clear days, the sea. Walking time seven hours, climb eleven hundred metres.
        Day three is short. The path follows an old canal along the slope to the Weaver's hut, past three waterfalls and a
            bench with a visitors' book. There are sheep everywhere; close the gates and carry your bread inside the bag.
            Walking time three hours, climb two hundred metres.
        Day four goes down through meadows to Hallin. Take the upper bridge, since the lower one was washed away in spring.
            The bus to the station leaves at ten past two and at ten past five, and the inn next to the stop serves
            dumplings. Walking time five hours, climb one hundred metres.""",
}

# The document, then what is to be copied from it.
EXTRACTION = [
    ("harbour", "Repeat this text word for word, but leave out the title and the last paragraph."),
    ("grinder", 'Copy this text word for word from the heading "Setting up" to "look for a pebble."'),
    ("minutes", "Repeat this text word for word, but leave out the last line."),
    ("boat_hire", 'Copy this price list word for word from the heading "Rowing and paddling" to "not for the northern bay".'),
    ("clockmaker", "Repeat this text word for word, but leave out the last paragraph."),
    ("night_log", 'Copy this log word for word from the line "22:40 Truck from Lundsay" to the line "03:30 Truck to Velde".'),
    ("hut_walk", "Repeat this text word for word, but leave out day four."),
    ("release_notes", 'Copy this text word for word from the heading "New" to "leaves out its last line."'),
    ("tuner", "Repeat this text word for word, but leave out the last question and its answer."),
    ("letter", "Repeat this letter word for word, but leave out the greeting and the signature."),
    ("harbour", 'Copy this text word for word from "We did not want" to "depends on the weather."'),
    ("minutes", 'Copy this text word for word from "2. The lift" to "does not pay for it."'),
    ("clockmaker", 'Copy this text word for word from "One autumn" to "turn her head."'),
    ("hut_walk", 'Copy this text word for word from "Day two crosses" to "climb one hundred metres."'),
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

EDITOR = "You edit files. Make the change that is asked for. Return the whole file and nothing else."

# What is asked, the language, then the file.
CODE_EDIT = [
    (
        "Change the message of the error in withdraw to 'not enough money'.",
        "python",
        """
        class Account:
            def __init__(self, owner, balance=0):
                self.owner = owner
                self.balance = balance
                self.history = []

            def deposit(self, amount):
                if amount <= 0:
                    raise ValueError('amount must be positive')
                self.balance += amount
                self.history.append(('deposit', amount))

            def withdraw(self, amount):
                if amount <= 0:
                    raise ValueError('amount must be positive')
                if amount > self.balance:
                    raise ValueError('balance too low')
                self.balance -= amount
                self.history.append(('withdraw', amount))

            def report(self):
                for kind, amount in self.history:
                    print(f'{kind:10} {amount:8.2f}')
                print(f'{self.owner} has {self.balance:.2f}')""",
    ),
    (
        "Rename the variable total to total_rain everywhere.",
        "python",
        """
        import csv
        import sys
        from collections import defaultdict


        def monthly_rain(path):
            total = defaultdict(float)
            with open(path, newline='') as file:
                for row in csv.DictReader(file):
                    if not row['rain_mm']:
                        continue
                    month = row['date'][:7]
                    total[month] += float(row['rain_mm'])
            return dict(total)


        def main():
            path = sys.argv[1]
            total = monthly_rain(path)
            for month in sorted(total):
                print(month, round(total[month], 1))
            wettest = max(total, key=total.get)
            print('wettest month:', wettest)


        if __name__ == '__main__':
            main()""",
    ),
    (
        "Change the port of the shop from 8080 to 9090.",
        "yaml",
        """
        services:
          database:
            image: postgres:16
            restart: always
            environment:
              POSTGRES_USER: shop
              POSTGRES_DB: orders
            volumes:
              - ./data:/var/lib/postgresql/data
          shop:
            build: ./shop
            depends_on:
              - database
            ports:
              - "8080:8000"
            environment:
              DATABASE_HOST: database
              LANGUAGE: en
              MAIL_SENDER: orders@example.com
          worker:
            build: ./worker
            depends_on:
              - database
            environment:
              DATABASE_HOST: database
              QUEUE_NAME: invoices""",
    ),
    (
        "Change the default of --quality from 85 to 90.",
        "python",
        """
        import argparse
        from pathlib import Path

        from PIL import Image


        def parse():
            parser = argparse.ArgumentParser(description='Shrink photos.')
            parser.add_argument('folder', type=Path)
            parser.add_argument('--width', type=int, default=1200)
            parser.add_argument('--quality', type=int, default=85)
            parser.add_argument('--out', type=Path, default=Path('small'))
            return parser.parse_args()


        def main():
            options = parse()
            options.out.mkdir(exist_ok=True)
            for path in sorted(options.folder.glob('*.jpg')):
                image = Image.open(path)
                height = image.height * options.width // image.width
                small = image.resize((options.width, height))
                small.save(options.out / path.name, quality=options.quality)
                print(path.name, small.size)


        main()""",
    ),
    (
        "Add a column email of type TEXT behind the column name of the table members.",
        "sql",
        """
        CREATE TABLE members (
            id INTEGER PRIMARY KEY,
            name TEXT NOT NULL,
            joined DATE NOT NULL,
            street TEXT,
            town TEXT
        );

        CREATE TABLE loans (
            id INTEGER PRIMARY KEY,
            member_id INTEGER NOT NULL REFERENCES members (id),
            title TEXT NOT NULL,
            lent DATE NOT NULL,
            returned DATE
        );

        CREATE INDEX loans_by_member ON loans (member_id);

        CREATE VIEW open_loans AS
        SELECT members.name, loans.title, loans.lent
        FROM loans
        JOIN members ON members.id = loans.member_id
        WHERE loans.returned IS NULL
        ORDER BY loans.lent;""",
    ),
    (
        "Add a docstring to the method heaviest.",
        "python",
        """
        from dataclasses import dataclass, field


        @dataclass
        class Parcel:
            number: int
            weight: float
            town: str
            fragile: bool = False


        @dataclass
        class Truck:
            limit: float
            parcels: list[Parcel] = field(default_factory=list)

            @property
            def weight(self) -> float:
                return sum(parcel.weight for parcel in self.parcels)

            def load(self, parcel: Parcel) -> bool:
                if self.weight + parcel.weight > self.limit:
                    return False
                self.parcels.append(parcel)
                return True

            def heaviest(self) -> Parcel:
                return max(self.parcels, key=lambda parcel: parcel.weight)""",
    ),
    (
        'Set "retries" to 5.',
        "json",
        """
        {
          "name": "weather-station",
          "interval_seconds": 300,
          "sensors": [
            {"id": "roof", "type": "temperature", "unit": "celsius"},
            {"id": "yard", "type": "humidity", "unit": "percent"},
            {"id": "mast", "type": "wind", "unit": "metres per second"}
          ],
          "upload": {
            "host": "data.example.org",
            "path": "/v1/readings",
            "timeout_seconds": 20,
            "retries": 3,
            "compress": true
          },
          "alarms": {
            "frost": {"sensor": "roof", "below": 0},
            "storm": {"sensor": "mast", "above": 17}
          },
          "log_file": "station.log"
        }""",
    ),
    (
        "Rename the method push to add.",
        "python",
        """
        class Heap:
            def __init__(self):
                self.items = []

            def push(self, item):
                self.items.append(item)
                child = len(self.items) - 1
                while child > 0:
                    parent = (child - 1) // 2
                    if self.items[parent] <= self.items[child]:
                        break
                    self.swap(parent, child)
                    child = parent

            def swap(self, a, b):
                self.items[a], self.items[b] = self.items[b], self.items[a]

            def smallest(self):
                if not self.items:
                    raise IndexError('the heap is empty')
                return self.items[0]

            def __len__(self):
                return len(self.items)""",
    ),
    (
        "Change the text of the button to 'Book a table'.",
        "html",
        """
        <section id="booking">
          <h2>Your evening with us</h2>
          <p>We are open from Tuesday to Sunday, 17:00 to 23:00.</p>
          <form action="/book" method="post">
            <label for="name">Name</label>
            <input id="name" name="name" type="text" required>
            <label for="guests">Guests</label>
            <input id="guests" name="guests" type="number" min="1" max="12">
            <label for="day">Day</label>
            <input id="day" name="day" type="date" required>
            <label for="note">Anything we should know?</label>
            <textarea id="note" name="note" rows="3"></textarea>
            <button type="submit">Send</button>
          </form>
          <p class="small">For more than twelve guests, please call us.</p>
        </section>""",
    ),
    (
        "Change the waiting time between two attempts from 2 to 5 seconds.",
        "python",
        """
        import json
        import time
        import urllib.error
        import urllib.request

        ATTEMPTS = 4
        PAUSE = 2.0


        def load(url):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    with urllib.request.urlopen(url, timeout=10) as answer:
                        return json.load(answer)
                except urllib.error.URLError as error:
                    print(f'attempt {attempt} failed: {error.reason}')
                    if attempt == ATTEMPTS:
                        raise
                    time.sleep(PAUSE)


        def titles(url):
            books = load(url)['books']
            return [book['title'] for book in books if book['in_print']]""",
    ),
    (
        "Set the level of the section backup to DEBUG.",
        "ini",
        """
        [general]
        name = archive
        language = en
        time_zone = UTC
        keep_days = 30

        [backup]
        source = /srv/documents
        target = /mnt/backup
        start = 02:30
        level = INFO
        compress = yes
        exclude = *.tmp, *.cache

        [mail]
        server = mail.example.com
        port = 587
        sender = archive@example.com
        receiver = office@example.com
        on_success = no
        on_failure = yes

        [report]
        format = html
        folder = /srv/reports
        day = monday""",
    ),
    (
        "Add a test that the slug of an empty title is an empty string.",
        "python",
        """
        import re
        import unittest


        def slug(title):
            text = title.lower()
            text = text.replace('&', ' and ')
            text = re.sub(r'[^a-z0-9]+', '-', text)
            return text.strip('-')


        class SlugTest(unittest.TestCase):
            def test_spaces_become_dashes(self):
                self.assertEqual(slug('A Long Day'), 'a-long-day')

            def test_signs_are_left_out(self):
                self.assertEqual(slug('What now?!'), 'what-now')

            def test_ampersand_is_spelled_out(self):
                self.assertEqual(slug('Salt & Pepper'), 'salt-and-pepper')

            def test_numbers_stay(self):
                self.assertEqual(slug('Top 10 Hills'), 'top-10-hills')


        if __name__ == '__main__':
            unittest.main()""",
    ),
    (
        "Change the size of the board from 8 to 12.",
        "python",
        """
        import random

        SIZE = 8
        ALIVE = '#'
        DEAD = '.'


        def new_board():
            return [[random.random() < 0.3 for _ in range(SIZE)] for _ in range(SIZE)]


        def neighbours(board, y, x):
            count = 0
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    if dy or dx:
                        count += board[(y + dy) % SIZE][(x + dx) % SIZE]
            return count


        def step(board):
            result = []
            for y in range(SIZE):
                counts = [neighbours(board, y, x) for x in range(SIZE)]
                result.append([n == 3 or (n == 2 and board[y][x]) for x, n in enumerate(counts)])
            return result""",
    ),
    (
        "Rename the parameter words to entries in both functions.",
        "python",
        """
        import random


        def pick(words, level):
            \"\"\"A word that is long enough for the level.\"\"\"
            long_enough = [word for word in words if len(word) >= 3 + level]
            return random.choice(long_enough)


        def play(words, level=1, lives=7):
            secret = pick(words, level)
            found = set()
            while lives > 0:
                shown = ' '.join(c if c in found else '_' for c in secret)
                print(shown, f'({lives} lives left)')
                if '_' not in shown:
                    print('Well done!')
                    return True
                letter = input('Letter: ').strip().lower()
                if letter in secret:
                    found.add(letter)
                else:
                    lives -= 1
            print('The word was', secret)
            return False""",
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


def copy(document: str, task: str) -> list[dict[str, str]]:
    text = re.sub("\n +", " ", textwrap.dedent(DOCUMENTS[document]).strip())
    return ask(f"{task}\n\n{text}")


def edit(task: str, language: str, file: str) -> list[dict[str, str]]:
    request = f"```{language}\n{textwrap.dedent(file).strip()}\n```\n\n{task}"
    return [{"role": "system", "content": EDITOR}, *ask(request)]


def rows() -> list[dict[str, Any]]:
    """70 good rows, kinds mixed, and 4 bad ones at fixed places among them."""
    kinds = [
        [row("question", i, ask(text)) for i, text in enumerate(QUESTION)],
        [row("extraction", i, copy(*item)) for i, item in enumerate(EXTRACTION)],
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
        "extraction-02": {"max_new_tokens": 200},
        "extraction-05": {"max_new_tokens": 160},
        "extraction-11": {"max_new_tokens": 64},
        "code_edit-03": {"max_new_tokens": 200},
        "code_edit-08": {"max_new_tokens": 96},
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

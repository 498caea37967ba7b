"""Texts by which K/V scales are calibrated (`kv_calibration.py`). A change of them is a change of `CALIBRATION`."""

from __future__ import annotations

TEXTS = (
    "The lighthouse keeper counted the ships every evening, although nobody had asked him to. On calm days he wrote "
    "down their colours and their flags; in storms he only wrote the number, and next to it the direction of the "
    "wind. After eleven years the notebook was full. He sent it to the harbour office with a short letter: \"I do not "
    "know what this is good for, but it is complete.\" The office answered a month later that the record had settled "
    "a dispute over insurance worth more than the tower itself, and that a new notebook, with a better binding, was "
    "on its way.",
    "A train leaves the station at 09:15 and travels 186 km at 62 km/h. A second one leaves 45 minutes later at 93 "
    "km/h. When does the second overtake the first?\n\nThe first has a lead of 62 * 0.75 = 46.5 km. The second gains "
    "93 - 62 = 31 km in each hour, so it needs 46.5 / 31 = 1.5 hours. It left at 10:00, so it overtakes at 11:30, "
    "after 139.5 km. Check: the first has travelled for 2.25 hours, 2.25 * 62 = 139.5 km. The answer is 11:30.",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n    \"\"\"Merge two sorted lists into one.\"\"\"\n   "
    " out, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n            "
    "out.append(left[i])\n            i += 1\n        else:\n            out.append(right[j])\n            j += 1\n   "
    " return out + left[i:] + right[j:]\n\n\nassert merge([1, 4, 9], [2, 3, 10]) == [1, 2, 3, 4, 9, 10]\n#include "
    "<stdio.h>\nint main(void) { for (int i = 0; i < 10; ++i) printf(\"%d\\n\", i * i); return 0; }\n",
    "{\"id\": 48213, \"name\": \"Zoë Hartmann\", \"tags\": [\"a/b\", \"c&d\", \"<e>\"], \"price\": -1.25e-7, "
    "\"active\": true, \"notes\": null}\n| year | births | deaths |\n|---|---|---|\n| 1901 | 35,118 | 20,402 |\n| "
    "1951 | 29,870 | 14,776 |\n| 2001 | 22,019 | 17,934 |\n1. Preheat the oven to 220 °C.\n2. Mix 500 g of flour, 350 "
    "ml of water, 10 g of salt.\n3. Bake for 35-40 minutes.\nhttps://example.org/path?q=1&r=%20#top  user@example.org "
    " +49 (0)30 1234567  ISBN 978-3-16-148410-0",
    "Der Fluss trat im April über die Ufer und blieb drei Wochen. Le marché ouvre à six heures, mais les meilleurs "
    "fruits sont vendus avant l'aube. El tren de la noche llega siempre tarde, y nadie se queja. Поезд пришёл "
    "вовремя, но на платформе никого не было. 春になると、川の両側に桜が咲きます。今天的天气很好,我们去公园散步吧。 "
    "오늘은 비가 옵니다. القطار يصل في الساعة الثامنة. आज मौसम अच्छा है। Το πλοίο φεύγει το πρωί. 🙂🚀 ∑ ∫ √ ≤ ≠ π ≈ "
    "3.14159265358979",
    "Theorem. There are infinitely many primes. Proof. Let p_1, ..., p_n be primes, and let N = p_1 p_2 ... p_n + 1. "
    "Some prime p divides N. If p were one of the p_i, it would divide N - p_1 ... p_n = 1, which is impossible. So p "
    "is a further prime. QED.\n\\begin{equation} \\int_0^\\infty e^{-x^2} \\, dx = \\frac{\\sqrt{\\pi}}{2} "
    "\\end{equation}\nThe patient, a 54-year-old man, was admitted with chest pain (7/10) and a blood pressure of "
    "158/94 mmHg; troponin was 0.04 ng/ml. He was given aspirin, 300 mg.",
    "the the the the the the the the the the the the the the the the the the the the the the the the the the the the "
    "the the the the 0000000000000000 1111111111111111 aaaaaaaaaaaaaaaa ................ ---------------- \n\n\n\n\n\n"
    "\n\n\t\t\t\t\t\t\t\t",
)
"""Prose, reasoning with numbers, code, structured text, other languages, mathematics and a report, repetition."""

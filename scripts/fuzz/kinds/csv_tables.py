"""Tables of text: wrong encodings, ragged rows, cells that are no numbers or that are huge."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import ClassVar

from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.byte_mutations import mutated_bytes
from scripts.fuzz.data import SMALL, read_as_commands_do

CELLS = (
    "", " ", "nan", "inf", "-inf", "1e999", "-1e-999", "0x10", "1_000", "1,5", '"', '""', '"1"', '"1\n2"', '"1', "\0", "a\0b", "#1", "1j",
    "=1+1", "=cmd|' /C calc'!A0", "__import__('os')", "True", "None", "٣", "1\r2", "\u2028", "1\x0c", "9" * 400, "9" * 6000, "1" * 200_000,
    '"' + "x" * 200_000 + '"', "," * 2000, "\ufeff1",
)  # fmt: skip
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin1", "cp037", "utf-7")
HEADERS = (
    "", "a,a,b,c,label", "a,b,c,d", "a,b,c,d,", ",,,,", "a;b;c;d;label", "label,a,b,c,d", " a , b , c , d , label ", '"a,b,c,d,label',
    "a,b,c,d,label,sample_weight", "x,label", "\0,a,b,c,label", "a" * 200_000 + ",b,c,d,label", ",".join(f"c{i}" for i in range(5000)),
    "a,b,c,d,y\r", "ä,ö,ü,ß,label",
)  # fmt: skip


class CSVTables(Attempt):
    share: ClassVar[int] = 7

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = "table"
        self.main = "damaged.csv"
        self.files[self.main] = _damaged_table(rng)

    def run(self, rng: random.Random, stage: Stage) -> str:
        stage("read")
        read_as_commands_do([self.main])
        return "read"


def _damaged_table(rng: random.Random) -> bytes:
    header = "a,b,c,d,label"
    rows = [[*map(str, x), str(y)] for x, y in zip(SMALL["X"], SMALL["y"])]
    encoding = "utf-8"
    for _ in range(rng.choice((1, 1, 2, 4))):
        kind = rng.randrange(7)
        row = rng.choice(rows) if rows else []
        if kind <= 1 and row:
            row[rng.randrange(len(row))] = rng.choice(CELLS)
        elif kind == 2 and row:  # a ragged row
            del row[rng.randrange(len(row)) :]
        elif kind == 3:
            row.append(rng.choice(CELLS))
        elif kind == 4:
            header = rng.choice(HEADERS)
        elif kind == 5:
            encoding = rng.choice(ENCODINGS)
        elif kind == 6 and rng.random() < 0.2:
            rows.clear()
    end = rng.choice(("\n", "\n", "\r\n", "\r", "\n\n", "\0\n", "\x0b"))
    text = end.join([header, *(",".join(row) for row in rows)])
    data = text.encode(encoding, errors="replace")
    return mutated_bytes(data, rng) if rng.random() < 0.3 else data

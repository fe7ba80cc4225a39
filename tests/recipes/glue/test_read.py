"""Files become columns, whatever their kind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from anytrain.core.errors import BadInput, Notice
from anytrain.recipes.glue.sources import read

REAL = Path(__file__).parents[3].parent / "shared/data/glue"
ROWS = [
    {"sentence1": 'He said "no".', "sentence2": "He, too, refused.", "label": 1},
    {"sentence1": "\u2028One line\x85 still.", "sentence2": "Zwei Zeilen: ü", "label": 0},
]


def _write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def _text(kind: str) -> str:
    if kind == "csv":
        quoted = [
            ",".join('"' + str(cell).replace('"', '""') + '"' for cell in row.values())
            for row in ROWS
        ]
        return "\n".join(["sentence1,sentence2,label", *quoted]) + "\n"
    if kind == "tsv":
        lines = ["\t".join(map(str, row.values())) for row in ROWS]
        return "\n".join(["sentence1\tsentence2\tlabel", *lines]) + "\n"
    if kind == "jsonl":
        return "\n".join(json.dumps(row) for row in ROWS) + "\n"
    return json.dumps(ROWS)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl"])
def test_the_same_rows_come_out_of_every_kind_of_file(
    tmp_path: Path, kind: str, ending: str
) -> None:
    table = read(_write(tmp_path / f"train.{kind}{ending}", _text(kind)))
    assert list(table.columns) == ["sentence1", "sentence2", "label"]
    assert list(table.columns["sentence1"]) == [row["sentence1"] for row in ROWS]
    assert [int(label) for label in table.columns["label"]] == [1, 0]


def test_a_json_file_may_hold_one_object_a_line_or_a_list_called_data(tmp_path: Path) -> None:
    as_lines = read(_write(tmp_path / "a.json", _text("jsonl")))
    as_data = read(_write(tmp_path / "b.json", json.dumps({"version": 1, "data": ROWS})))
    assert as_lines.columns == as_data.columns


def test_parquet_is_read(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    assert read(tmp_path / "train.parquet").columns["label"] == [1, 0]


def test_a_mark_before_the_first_column_is_no_part_of_its_name(tmp_path: Path) -> None:
    table = read(_write(tmp_path / "train.tsv", "\ufeffsentence\tlabel\r\na\t1\r\n"))
    assert table.columns == {"sentence": ["a"], "label": ["1"]}


def test_a_quote_in_a_tsv_is_text(tmp_path: Path) -> None:
    table = read(_write(tmp_path / "train.tsv", 'sentence\tlabel\n"half\t1\nend"\t0\n'))
    assert table.columns["sentence"] == ['"half', 'end"']


def test_colas_own_download_has_no_header_line(tmp_path: Path) -> None:
    names = ("source", "label", "star", "sentence")
    bare = _write(tmp_path / "train.tsv", "gj04\t1\t\tThey left.\ngj04\t0\t*\tThey leave was.\n")
    assert read(bare, names).columns["sentence"] == ["They left.", "They leave was."]
    headed = _write(tmp_path / "dev.tsv", "source\tlabel\tstar\tsentence\nx\t1\t\tHi.\n")
    assert read(headed, names).columns["sentence"] == ["Hi."]


def test_a_few_broken_lines_are_left_out_and_told(tmp_path: Path) -> None:
    lines = ["a\t1"] * 300
    lines[4] = "broken"
    path = _write(tmp_path / "train.tsv", "sentence\tlabel\n" + "\n".join(lines) + "\n")
    with pytest.warns(Notice, match=r"1 of 300 rows .* left out \(lines 6\)"):
        assert len(read(path)) == 299


BROKEN = {
    "train.txt": ("a\n", "kind of file"),
    "absent.csv": (None, "no such file"),
    "train.tsv": ("a\tb\nx\ny\nz\t1\n", "lines 2, 3 have another number"),
    "one.tsv": ("a\tb\nx\ny\t1\n", "(?s)1 of 2 rows is broken.*line 2 has another number"),
    "empty.csv": ("a,b\n", "holds no rows"),
    "twice.csv": ("a,a\n1,2\n", "same name"),
    "quote.csv": ('a,b\n"x"y,1\n', "not a valid csv"),
    "rows.json": ('[{"a": 1}, {"b": 1}]', "row 2 differs from the first in a, b"),
    "list.json": ("[1, 2]", "something other than objects"),
    "half.json": ('{"a": 1', "neither json nor one json object a line"),
    "no.parquet": ("text", "arquet"),
    "no.csv.gz": (b"text", "Not a gzipped file"),
    "latin.csv": ("sentence,label\nü,1\n".encode("latin-1"), "utf-8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, name: str) -> None:
    content, why = BROKEN[name]
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput, match=why):
        read(tmp_path / name)


@pytest.mark.parametrize(("split", "count"), [("train", 3668), ("dev", 408)])
def test_every_row_of_mrpc_is_read(split: str, count: int) -> None:
    path = REAL / "mrpc" / f"{split}.tsv.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here: MRPC's terms do not let it travel with this project")
    table = read(path)
    assert len(table) == count
    assert set(table.columns["label"]) == {"0", "1"}

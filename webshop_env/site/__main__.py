"""Serve shop and viewer: `python -m webshop_env.site [VIEW]`, then open the address that it prints."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from webshop_env.errors import ShopGymError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m webshop_env.site", description="The shop in a browser, and a viewer of recorded episodes."
    )
    parser.add_argument(
        "view",
        nargs="?",
        type=Path,
        help="for the viewer: a training run, a rollout (.parquet), an episode file (.jsonl), or a directory of them",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: only this machine)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--data", metavar="DIR", help="catalogue of the shop instead of the embedded one")
    parser.add_argument("--version", choices=("v0", "v1"), default="v1", help="of the shop (default: v1)")
    parser.add_argument("--goals", choices=("synthetic", "human"), default="synthetic")
    parser.add_argument("--split", choices=("train", "eval", "test", "all"), default="all", help="of random goals")
    parser.add_argument("--max-steps", type=int, default=100, metavar="N", help="of a visitor's episode (default: 100)")
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep visitors' episodes in this directory")
    options = parser.parse_args(arguments)
    try:
        return _serve(options)
    except ShopGymError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _serve(options: argparse.Namespace) -> int:
    try:
        from webshop_env.site.app import SiteConfig, create_app
        from webshop_env.site.server import SiteServer
    except ModuleNotFoundError as error:
        raise ShopGymError(f"the site needs {error.name}: pip install 'shopgym[site]'") from None
    from webshop_env.shop import check_whole

    if not 0 <= options.port < 65536:
        raise ShopGymError(f"--port must be in 0 to 65535, got {options.port}")
    if options.view is not None and not options.view.exists():
        raise ShopGymError(f"{options.view}: does not exist; name a run directory, a rollout or an episode file")
    check_whole("--max-steps", options.max_steps, 1)
    app = create_app(
        SiteConfig(
            data_dir=options.data,
            version=options.version,
            goals=options.goals,
            split=options.split,
            max_steps=options.max_steps,
            view=options.view,
            record=options.record,
            trusted_hosts=(*LOOPBACK[:2], "[::1]") if options.host in LOOPBACK else None,
        )
    )
    server = SiteServer(app, options.host, options.port)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: what was recorded is kept
        print(f"shop    {server.url}", flush=True)  # who reads it may end the site at once
        if options.view is not None:
            print(f"viewer  {server.url}view/", flush=True)
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        for number in before:  # whoever asks again waits for the same end
            signal.signal(number, signal.SIG_IGN)
        server.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`channels`: the channels that there are, as lines or as JSON."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from texvlm.channel_sources import EMBEDDING, HISTORIES, PREVIOUS
from texvlm.channels import CHANNELS
from texvlm.cli.output import writing
from texvlm.cli.tiles import NEEDS
from texvlm.video.lagged import LAGGED

IN_A_FILM = {
    **dict.fromkeys(LAGGED, "lagged"),
    **dict.fromkeys((*EMBEDDING, *PREVIOUS, *HISTORIES), "carried"),
    **dict.fromkeys(("attention", "previous_attention"), "given"),
}
"""What a `VideoStream` does with a channel; all others are exact."""


def describe() -> list[dict[str, Any]]:
    """The channels as plain values."""
    return [
        {
            "index": channel.index,
            "name": channel.name,
            "needs": NEEDS.get(channel.name),
            "reducer": channel.reducer,
            "film": IN_A_FILM.get(channel.name, "exact"),
            "description": channel.description,
            "range": [bound if math.isfinite(bound) else None for bound in channel.range],
            "halo": channel.halo,
        }
        for channel in CHANNELS
    ]


def run(args: argparse.Namespace) -> int:
    """The command."""
    found = describe()
    with writing(args.json or "-") as file:
        if args.json is not None:
            file.write(json.dumps(found, indent=1) + "\n")
            return 0
        for row in [{name: name for name in found[0]}, *found]:
            needs = row["needs"] or "-"
            file.write(f"{row['index']:>5}  {row['name']:20}{needs:24}{row['reducer']:9}{row['film']:9}{row['description']}\n")
    return 0

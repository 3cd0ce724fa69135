"""Why requests are placed again, for people and for labels of metrics: there is an end of these words."""

from __future__ import annotations

from collections.abc import Mapping

from bifolio.protos.messages import Cause

CAUSES: Mapping[Cause, str] = {
    "stale": "a block of their placement belonged to another lease by then",
    "prefill lost": "their prefill replica was lost",
    "decode lost": "their decode replica was lost",
    "transfer failed": "their KV blocks did not come",
    "engine failed": "a step of an engine raised, or did not end",
    "preempted": "there were no blocks for their next tokens",
    "drained": "their replica was leaving",
    "revoked": "their blocks had been taken back",
    "other": "of something else: see the ingress' log",
}

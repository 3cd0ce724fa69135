"""Who owns which KV block, and how blocks move: ledger, tags, actor, transfer."""

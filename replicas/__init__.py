"""One replica: model, KV cache, scheduler, engine, and the two Serve deployments."""

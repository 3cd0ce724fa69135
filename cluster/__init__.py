"""What users touch: configuration, ingress, tokenizer, client, CLI."""

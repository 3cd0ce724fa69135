"""The contract: protobuf files and their generated code, frozen messages, errors. Imports nothing of ours."""

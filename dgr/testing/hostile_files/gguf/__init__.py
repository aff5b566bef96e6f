"""GGUF files that are damaged where their structure says it hurts."""

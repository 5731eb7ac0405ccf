"""FLUX.2 dev and klein: double- and single-stream image transformers with a Mistral 3 or Qwen3 text encoder."""

"""Loading of safetensors weights directly into their destination, without a second copy in memory."""

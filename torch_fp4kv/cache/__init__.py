"""What a user holds: handles, layer storage, Hugging Face cache, `nn.Module` cache."""

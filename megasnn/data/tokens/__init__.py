"""Text as tokens: tokenizers, Megatron's indexed data sets, and samples with a fixed length."""

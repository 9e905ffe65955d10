"""What a server adds to decoding: processors, texts of tokens and where they end, texts known beforehand."""

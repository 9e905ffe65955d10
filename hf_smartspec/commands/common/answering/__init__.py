"""What commands have in common that answer prompts: models, sampling, engines and text that grows."""

"""Model families: what each one's config.json means, in terms of the parts that model.py puts together."""

"""The response cache: answers that are known, by the exact request that they answer."""

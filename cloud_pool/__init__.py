"""The cloud pool: dynamic batching of torch models on the devices of one machine."""

"""OpenAI's HTTP interface over any `ModelHost`: the same code in a gateway and on a device."""

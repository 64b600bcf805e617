"""The gateway's decisions, free of IO: values and `now` in, values out."""

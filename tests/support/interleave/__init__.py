"""Requests' lives in random order around the real cores: `script` draws and shrinks, `world` lets it happen.

`life` and `books` hold what must be true: of one request's actions, and of what all requests share.
"""

"""One file per runtime behind one small interface; the only place, with `build`, that imports a model runtime."""

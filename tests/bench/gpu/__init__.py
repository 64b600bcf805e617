"""What a GPU gives, and how much of it the pool keeps: encoders, the pool around them, and generating models.

    python -m tests.bench.gpu [--quick] [--only encoders|served|generating] [--repository FOLDER]

    encoders     texts a second of the pool's engines against torch as anybody would run it       encoders.py
    served       the same behind a pool's link, of one worker and of two                          served.py
    generating   tokens a second and first tokens of continuous batching, and whether texts are right  generating.py

Needs CUDA; without it all goals are skipped. Weights are random ones of the given shapes, except where the repository
holds `smollm2`: what a GPU takes for a call does not depend on them. Texts have log-normal lengths, as those of
`tests.bench.batching`. Ratios are between ways of one run, in turn within each repeat.
"""

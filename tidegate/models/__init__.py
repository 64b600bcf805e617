"""Models as files and as numbers: manifests, the repository, the work of a request, packing and confidence.

Every process imports `Manifest` and `Repository`. Running a model is `tidegate/engines`; building and converting one is
`tidegate/tools/build`.
"""

"""Upper bounds on answers in time that no policy can beat, from perfect knowledge of one seed's world.

reach      when a request can be at a worker at the earliest, and must leave it at the latest
machines   how much work it is there, and when the worker can work
bound      the linear program over both, and the proof that its dual prices give
"""

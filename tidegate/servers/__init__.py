"""The ports on which a process serves: HTTP and gRPC servers with connection limits and roles.

The three processes import the two servers, the configuration section `limits` and the address functions. What is served
on a port does not belong here: it is in `tidegate/oip`, `tidegate/link` and the processes.
"""

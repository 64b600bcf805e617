from tidegate.client.async_client import AsyncTidegate as AsyncTidegate
from tidegate.client.retry_policy import RetryPolicy as RetryPolicy
from tidegate.client.sync_client import Tidegate as Tidegate

__version__: str

"""Chat bases, the models behind them, and what adapter authors need."""

from culet.adapters.aichat import AgentToolRequest as AgentToolRequest
from culet.adapters.aichat import AIChatAgent as AIChatAgent
from culet.adapters.aichat import ChatRecovery as ChatRecovery
from culet.adapters.aichat import ChatRecoveryOptions as ChatRecoveryOptions
from culet.adapters.aichat import TurnResult as TurnResult
from culet.adapters.anthropic import AnthropicModel as AnthropicModel
from culet.adapters.chat import ChatResponse as ChatResponse
from culet.adapters.environment import model_from_environment as model_from_environment
from culet.adapters.extractive import ExtractiveModel as ExtractiveModel
from culet.adapters.model import Model as Model
from culet.adapters.model import ModelRequest as ModelRequest
from culet.adapters.openai import OpenAIModel as OpenAIModel
from culet.adapters.remote import ModelCut as ModelCut
from culet.adapters.remote import ModelError as ModelError
from culet.adapters.remote import ModelLimited as ModelLimited
from culet.adapters.remote import ModelRefused as ModelRefused
from culet.adapters.remote import ModelUnavailable as ModelUnavailable
from culet.adapters.routed import RoutedAgent as RoutedAgent
from culet.adapters.routed import RoutedAgents as RoutedAgents
from culet.adapters.scripted import ScriptedModel as ScriptedModel
from culet.adapters.submissions import Submission as Submission
from culet.adapters.submissions import Submissions as Submissions
from culet.adapters.think import Think as Think
from culet.adapters.tooling import Tool as Tool
from culet.adapters.tooling import ToolContext as ToolContext
from culet.adapters.tooling import tool as tool

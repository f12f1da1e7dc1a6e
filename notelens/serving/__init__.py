"""What a serving engine needs from the library, and what the library needs of an engine.

Nothing is imported before it is used: the plug-in of an engine runs in the engine's environment, with torch and safetensors
and nothing else of ours.
"""

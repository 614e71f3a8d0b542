"""Python backend of Triton: each output is the input in its place, whatever its datatype."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.pairs = [
            (spec["name"], output["name"], spec["data_type"] == "TYPE_BF16")
            for spec, output in zip(config["input"], config["output"], strict=False)
        ]

    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.answer(request)) for request in requests]

    def answer(self, request):
        answers = []
        for name, output, is_bfloat in self.pairs:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if is_bfloat:  # numpy has no such type
                answers.append(pb_utils.Tensor.from_dlpack(output, tensor))
            elif tensor is not None:
                answers.append(pb_utils.Tensor(output, tensor.as_numpy()))
        return answers

#pragma once

// The shape of a model that is no preset, from the config.json that its weights come with.

#include <string>
#include <string_view>

#include "foremoe/cluster/model_shape.h"

namespace foremoe {

// Understands the keys of huggingface/transformers' Mixtral, Qwen2/3-MoE, GLM-4-MoE and DeepSeek-V2/V3 families
// (Kimi-K2 is one of those); of a multimodal model, its text_config. The name is the folder's where the file is called
// config.json, else the file's. Throws InputError naming file, key and what is wrong.
ModelShape read_model_config(const std::string& path);
ModelShape parse_model_config(std::string_view text, const std::string& file);  // `file` names the text in errors

}  // namespace foremoe

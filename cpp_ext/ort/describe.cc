// The op table as text, so that the Python table of the same ops can be held against it.

#include <algorithm>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "gradfuse/op_table.h"

namespace gradfuse {
namespace {

std::string Quoted(const std::string& text) { return '"' + text + '"'; }

// Writes an op as a JSON object.
class Describer {
 public:
  explicit Describer(const TypeSet& t) : t_(t) {}

  void Input(const char* name, const Tensor&, const TypeSet& types) { AddInput(name, types, false); }
  void Input(const char* name, const std::optional<Tensor>&, const TypeSet& types) { AddInput(name, types, true); }
  void Attribute(const char* name, int64_t value) { AddAttribute(name, std::to_string(value)); }
  void Attribute(const char* name, float value) { AddAttribute(name, Number(value)); }
  void Attribute(const char* name, const std::string& value) { AddAttribute(name, Quoted(value)); }
  void Attribute(const char* name, const std::vector<int64_t>& values) {
    std::string list;
    for (int64_t value : values) Append(list, std::to_string(value));
    AddAttribute(name, "[" + list + "]");
  }
  void Output(const char* name, const MutableTensor&, const TypeSet&) { Append(outputs_, Quoted(name)); }

  std::string Object(const char* name) const {
    return "{\"name\": " + Quoted(name) + ", \"types\": " + List(t_) + ", \"inputs\": [" + inputs_ +
           "], \"attributes\": {" + attributes_ + "}, \"outputs\": [" + outputs_ + "]}";
  }

 private:
  // All digits that a float has for certain: "0.999", "1e-08".
  static std::string Number(float value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", static_cast<double>(value));
    return text;
  }
  static const char* Bool(bool value) { return value ? "true" : "false"; }
  static void Append(std::string& list, const std::string& item) { list += (list.empty() ? "" : ", ") + item; }
  // Of a set that follows T, for all that T may be.
  std::string List(const TypeSet& types) const {
    std::vector<DType> found(types.begin(), types.end());
    for (DType t : types.follows_t() ? t_ : TypeSet()) {
      const DType type = types.Choice(types.choices() - 1, t, t);
      if (std::find(found.begin(), found.end(), type) == found.end()) found.push_back(type);
    }
    std::string list;
    for (DType type : found) Append(list, Quoted(Name(type)));
    return "[" + list + "]";
  }
  void AddInput(const char* name, const TypeSet& types, bool optional) {
    Append(inputs_, "{\"name\": " + Quoted(name) + ", \"types\": " + (types.is_t() ? "\"T\"" : List(types)) +
                        ", \"optional\": " + Bool(optional) + ", \"read_by_host\": " + Bool(types.read_by_host()) +
                        "}");
  }
  void AddAttribute(const char* name, const std::string& value) { Append(attributes_, Quoted(name) + ": " + value); }

  TypeSet t_;
  std::string inputs_;
  std::string attributes_;
  std::string outputs_;
};

std::string DescribeOps() {
  std::string ops;
  ForEachOp(OpTable(), [&](auto* null) {
    using Args = std::remove_pointer_t<decltype(null)>;
    Describer describer(Args::kTypes);
    const Args args;
    Args::Visit(args, describer);
    ops += (ops.empty() ? "" : ", ") + describer.Object(Args::kName);
  });
  return "[" + ops + "]";
}

}  // namespace
}  // namespace gradfuse

// A JSON list of all ops: name, the types of T, inputs, attributes with their defaults, outputs. Lives forever.
extern "C" __attribute__((visibility("default"))) const char* gradfuse_describe_ops() {
  static const std::string& text = *new std::string(gradfuse::DescribeOps());
  return text.c_str();
}

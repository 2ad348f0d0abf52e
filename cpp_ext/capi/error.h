#pragma once

#include <exception>
#include <string>
#include <utility>

#include "acl/acl.h"
#include "gradfuse/status.h"

namespace gradfuse::capi {

// What a function of the C API gives back, and why.
class Error : public std::exception {
 public:
  Error(int code, std::string message) : code_(code), message_(std::move(message)) {}
  int code() const { return code_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  int code_;
  std::string message_;
};

// Throws an Error where `status` is one.
void ThrowIfError(const Status& status);

// Throws an Error of `code` where `pointer` is null.
inline void ExpectPointer(const void* pointer, const char* name, const char* wanted, int code) {
  if (pointer == nullptr) throw Error(code, std::string(name) + " is a null pointer; expected " + wanted);
}

// Keeps `<function>: <what the exception that is being handled says>` for aclGetRecentErrMsg, and gives its code.
int HandleException(const char* function) noexcept;

// The code that the functions of operators have for what another gives as `code`.
constexpr aclnnStatus ToOpCode(int code) {
  switch (code) {
    case ACLNN_ERR_PARAM_NULLPTR:
    case ACLNN_ERR_PARAM_INVALID: return code;
    case ACL_ERROR_INVALID_PARAM: return ACLNN_ERR_PARAM_INVALID;
    default: return ACLNN_ERR_RUNTIME_ERROR;
  }
}

// Runs the body of a C function: no exception leaves it.
template <class Body>
aclError Guarded(const char* function, const Body& body) noexcept {
  try {
    body();
    return ACL_SUCCESS;
  } catch (...) {
    return HandleException(function);
  }
}

// The same for the functions of operators.
template <class Body>
aclnnStatus GuardedOp(const char* function, const Body& body) noexcept {
  try {
    body();
    return ACL_SUCCESS;
  } catch (...) {
    return ToOpCode(HandleException(function));
  }
}

}  // namespace gradfuse::capi

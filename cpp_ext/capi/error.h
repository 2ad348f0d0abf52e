#pragma once

#include <stdexcept>
#include <string>

#include "acl/acl.h"
#include "gradfuse/status.h"

namespace gradfuse::capi {

// The code that a function of the C API returns, and why.
class Error : public std::runtime_error {
 public:
  Error(int code, const std::string& message) : std::runtime_error(message), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

// Throws an Error if `status` is not ok.
void ThrowIfError(const Status& status);

// Throws an Error of `code` if `pointer` is null.
template <class Object>
void ExpectPointer(const Object* pointer, const char* name, const char* wanted, int code) {
  if (pointer == nullptr) throw Error(code, std::string(name) + " is a null pointer; expected " + wanted);
}

// Stores `<function>: <message of the exception being handled>` for aclGetRecentErrMsg, and returns its code.
int HandleException(const char* function) noexcept;

// Translates a code to one that the functions of operators return.
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

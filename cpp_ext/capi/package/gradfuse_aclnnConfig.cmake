# The imported library gradfuse::aclnn. The package can be moved.
if(TARGET gradfuse::aclnn)
  return()
endif()
get_filename_component(_gradfuse_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
add_library(gradfuse::aclnn SHARED IMPORTED)
set_target_properties(gradfuse::aclnn PROPERTIES
  IMPORTED_LOCATION "${_gradfuse_root}/lib/libgradfuse_aclnn.so"
  INTERFACE_INCLUDE_DIRECTORIES "${_gradfuse_root}/include")
unset(_gradfuse_root)

# dlpack.h with the C exchange API (DLPack 1.3): from the apache-tvm-ffi wheel, a build requirement alone.

find_package(Python REQUIRED COMPONENTS Interpreter)
set(dlpack_hints ${Python_SITELIB}/tvm_ffi/include)
foreach(prefix ${CMAKE_PREFIX_PATH})
  list(APPEND dlpack_hints ${prefix}/tvm_ffi/include)
  file(GLOB in_prefix ${prefix}/lib/python3*/site-packages/tvm_ffi/include)
  list(APPEND dlpack_hints ${in_prefix})
endforeach()
find_path(EPILOQ_DLPACK_INCLUDE_DIR dlpack/dlpack.h HINTS ${dlpack_hints})
if(NOT EPILOQ_DLPACK_INCLUDE_DIR)
  message(FATAL_ERROR "dlpack.h was not found; pip install apache-tvm-ffi, or set EPILOQ_DLPACK_INCLUDE_DIR")
endif()

# Everything that compiles device code.

enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
include(${PROJECT_SOURCE_DIR}/third_party/cutlass.cmake)
# Its device code comes from the object libraries below; the Makefile generator asks for architectures nevertheless.
set_target_properties(epiloq PROPERTIES CUDA_ARCHITECTURES OFF)

# One compiler process of a CUTLASS 3.x source takes up to 4 GB.
cmake_host_system_information(RESULT memory_mb QUERY TOTAL_PHYSICAL_MEMORY)
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
math(EXPR cuda_jobs "${memory_mb} / 5000")
if(cuda_jobs GREATER cores)
  set(cuda_jobs ${cores})
endif()
if(cuda_jobs LESS 1)
  set(cuda_jobs 1)
endif()
set_property(GLOBAL PROPERTY JOB_POOLS cuda=${cuda_jobs})

# epiloq_kernels(<name> GENCODE <compute:code>... [CUTLASS] SOURCES ...)
# An object library for one set of architectures, linked into epiloq. Code that must differ by architecture lies in
# different libraries, so sources need no __CUDA_ARCH__ guards.
function(epiloq_kernels name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "CUTLASS" "" "GENCODE;SOURCES")
  add_library(${name} OBJECT ${arg_SOURCES})
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_VISIBILITY_PRESET hidden JOB_POOL_COMPILE cuda)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(${name} PRIVATE ${EPILOQ_DEFINITIONS})
  if(NOT arg_CUTLASS)
    list(APPEND arg_GENCODE ${EPILOQ_GENCODE_WAITING})
    list(REMOVE_DUPLICATES arg_GENCODE)
  endif()
  # PTX that no GPU would take: every 8.x has machine code, everything newer takes the newest PTX.
  if(EPILOQ_GENCODE_WAITING IN_LIST arg_GENCODE)
    list(REMOVE_ITEM arg_GENCODE 80:compute_80 89:compute_89)
    if(80:sm_80 IN_LIST arg_GENCODE)
      list(REMOVE_ITEM arg_GENCODE 75:compute_75)
    endif()
  endif()
  foreach(pair ${arg_GENCODE})
    string(REPLACE ":" ";" pair ${pair})
    list(GET pair 0 compute)
    list(GET pair 1 code)
    target_compile_options(${name} PRIVATE "SHELL:-gencode arch=compute_${compute},code=${code}")
  endforeach()
  # The standard as a flag, because CMake 3.25 does not know that nvcc 13 has it.
  # NDEBUG whatever the build type: without it ptxas serialises wgmma (C7510).
  target_compile_options(${name} PRIVATE -std=c++20 -DNDEBUG --expt-relaxed-constexpr -Xptxas=-v "SHELL:-diag-suppress 2908"
                                         -Wno-deprecated-gpu-targets)
  # A wheel two thirds as large, for 1 to 2 ms a kernel when it is first called. nvcc has it since 12.8; drivers since
  # that of CUDA 12.4 (550.54.14) can unpack it, so also every one that runs CUDA 13.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    target_compile_options(${name} PRIVATE --compress-mode=size)
  endif()
  if(arg_CUTLASS)
    foreach(folder ${EPILOQ_CUTLASS_INCLUDE_DIRS})
      target_compile_options(${name} PRIVATE "SHELL:-isystem \"${folder}\"")  # ccache does not know CMake's -isystem=
    endforeach()
    target_compile_definitions(${name} PRIVATE CUTLASS_ENABLE_GDC_FOR_SM90=1)
  endif()
  target_sources(epiloq PRIVATE $<TARGET_OBJECTS:${name}>)
endfunction()

# epiloq_sources(<list to append to> <name> EACH <rows a source> ROWS <row>... LINE <text> [WITH <name>=<value>|...]...
#                [TEMPLATE <file, kernels.cu.in by default>])
# Expands a template into sources, each of a few rows of a table: parsing one takes as long as several kernels.
# @INSTANTIATIONS@ is the text for each row and all combinations of values, which take the places of @ROW@ and of their
# names between @; @ROW@ in the name is the source's first row.
function(epiloq_sources result name)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "EACH;LINE;TEMPLATE" "ROWS;WITH")
  if(NOT arg_TEMPLATE)
    set(arg_TEMPLATE kernels.cu.in)
  endif()
  set(sources ${${result}})
  while(NOT arg_ROWS STREQUAL "")
    list(SUBLIST arg_ROWS 0 ${arg_EACH} rows)
    list(REMOVE_ITEM arg_ROWS ${rows})
    set(lines "${arg_LINE}")
    list(JOIN rows "|" values)
    foreach(pair "ROW=${values}" ${arg_WITH})
      string(REGEX MATCH "^([A-Z]+)=(.*)$" pair "${pair}")
      string(REPLACE "|" ";" values "${CMAKE_MATCH_2}")
      set(placeholder "@${CMAKE_MATCH_1}@")
      set(combined "")
      foreach(line ${lines})
        foreach(value ${values})
          string(REPLACE "${placeholder}" "${value}" with_value "${line}")
          list(APPEND combined "${with_value}")
        endforeach()
      endforeach()
      set(lines ${combined})
    endforeach()
    list(JOIN lines ";\n" INSTANTIATIONS)
    string(APPEND INSTANTIATIONS ";\n")
    list(GET rows 0 first)
    string(REPLACE "@ROW@" "${first}" source "${CMAKE_CURRENT_BINARY_DIR}/${name}.cu")
    configure_file(${arg_TEMPLATE} ${source} @ONLY)
    list(APPEND sources ${source})
  endwhile()
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

# epiloq_epilogues(<out variable> <list>): reads the names of a list of epilogues from src/epilogue/library.h, for which
# kernels are instantiated.
function(epiloq_epilogues result list)
  set(library ${PROJECT_SOURCE_DIR}/src/epilogue/library.h)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${library})
  file(STRINGS ${library} line REGEX "^using ${list} = ")
  if(NOT line MATCHES "= List<([A-Za-z0-9, ]+)>")
    message(FATAL_ERROR "${library}: expected one line 'using ${list} = List<Epilogue, ...>;', got '${line}'")
  endif()
  string(REPLACE ", " ";" epilogues "${CMAKE_MATCH_1}")
  set(${result} ${epilogues} PARENT_SCOPE)
endfunction()

# compute:code lists. PTX goes with all code but SM90's, so that newer GPUs than this build knows can run it.
# From SM90 on, hand-written kernels are launched while the kernel before them may still run (device_code.cuh): what was
# compiled for less, and does not wait for it, must not run there.
set(EPILOQ_GENCODE_WAITING 90:compute_90)
set(EPILOQ_GENCODE_75 75:sm_75 75:compute_75)
set(EPILOQ_GENCODE_80 80:sm_80 80:compute_80)
set(EPILOQ_GENCODE_89 89:sm_89 89:compute_89)
set(EPILOQ_GENCODE_90 90a:sm_90a)
if(EPILOQ_OLD_ON_NEW)
  list(APPEND EPILOQ_GENCODE_75 90:sm_90)
  list(APPEND EPILOQ_GENCODE_80 90:sm_90)
  list(APPEND EPILOQ_GENCODE_89 90:sm_90)
endif()
# Hand-written kernels that run everywhere.
set(EPILOQ_GENCODE_ALL "")
if(EPILOQ_HAS_SM75)
  list(APPEND EPILOQ_GENCODE_ALL 75:sm_75 75:compute_75)
endif()
if(EPILOQ_HAS_SM80)
  list(APPEND EPILOQ_GENCODE_ALL 80:sm_80 80:compute_80)
endif()
if(EPILOQ_HAS_SM90)
  list(APPEND EPILOQ_GENCODE_ALL 90:sm_90 90:compute_90)
endif()
# Those with float8.
set(EPILOQ_GENCODE_FLOAT8 "")
if(EPILOQ_HAS_SM89)
  list(APPEND EPILOQ_GENCODE_FLOAT8 89:sm_89 89:compute_89)
endif()
if(EPILOQ_HAS_SM90)
  list(APPEND EPILOQ_GENCODE_FLOAT8 90:sm_90 90:compute_90)
endif()

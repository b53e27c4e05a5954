# The rules of the house (docs/developers/architecture.md, docs/developers/contributing.md) as tests, and the proof that
# each of them can fail.

find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME house_rules.hold COMMAND ${Python3_EXECUTABLE} scripts/house_rules.py WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
add_test(NAME house_rules.each_can_fail COMMAND ${Python3_EXECUTABLE} scripts/house_rules.py --self-test
  WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})

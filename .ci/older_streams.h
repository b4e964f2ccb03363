// Included before all else in what wheels are made of: it compiles string streams where they are used. The constructors and
// `str` that a newer C++ library has ready for them are not in that of wheels' oldest systems.
//
// Not all templates: facets of locales are found by their addresses, which must be those of the library.

#include <locale>
#include <string>

#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#include <sstream>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 1

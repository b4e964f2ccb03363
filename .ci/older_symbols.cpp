// What the headers of newer compilers and of a newer glibc use, and the libraries of wheels' oldest systems lack.

#include <new>

// Of libstdc++ 11.
extern "C" [[noreturn, gnu::visibility("hidden")]] void throw_bad_array_new_length() __asm__(
    "_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// Of glibc 2.32. False: there may always be other threads.
extern "C" [[gnu::visibility("hidden")]] char const_single_threaded __asm__("__libc_single_threaded");
char const_single_threaded = 0;

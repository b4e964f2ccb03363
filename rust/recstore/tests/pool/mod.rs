//! An executor of as many threads as a test wants.

use rayon::prelude::*;
use recstore::Executor;

pub(crate) struct Pool(pub(crate) rayon::ThreadPool);

impl Pool {
    pub(crate) fn new(threads: usize) -> Box<Self> {
        Box::new(Self(rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()))
    }
}

impl Executor for Pool {
    fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        self.0.install(|| (0..count).into_par_iter().for_each(body));
    }

    fn num_threads(&self) -> usize {
        self.0.current_num_threads()
    }
}

//! An object store that fails at the operation it is told to.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// What of an operation that fails takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing.
    None,
    /// All: the answer was lost.
    Whole,
}

/// Objects in memory, of which one operation fails: put, get or list.
#[derive(Debug, Clone)]
pub(crate) struct Failing {
    pub(crate) objects: Arc<InMemory>,
    /// Operations until the one that fails.
    left: Arc<AtomicUsize>,
    effect: Effect,
    is_blind: bool,
}

impl Failing {
    /// Fails at operation `at`, counted from 0.
    pub(crate) fn new(objects: Arc<InMemory>, at: usize, effect: Effect) -> Self {
        Self { objects, left: Arc::new(AtomicUsize::new(at + 1)), effect, is_blind: false }
    }

    /// Fails never.
    pub(crate) fn never(objects: &Arc<InMemory>) -> Self {
        Self::new(Arc::clone(objects), usize::MAX - 1, Effect::None)
    }

    /// Fails never, and lists nothing.
    pub(crate) fn blind(objects: &Arc<InMemory>) -> Self {
        Self { is_blind: true, ..Self::never(objects) }
    }

    /// Whether the operation was come to.
    pub(crate) fn has_failed(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    fn fails(&self) -> bool {
        let before = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        before == Ok(1)
    }
}

fn failure() -> Error {
    Error::Generic { store: "failing", source: "as it was told to".into() }
}

impl fmt::Display for Failing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("failing:")
    }
}

#[async_trait]
impl ObjectStore for Failing {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let fails = self.fails();
        if fails && self.effect == Effect::None {
            return Err(failure());
        }
        let put = self.objects.put_opts(path, payload, options).await;
        if fails { Err(failure()) } else { put }
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        if self.fails() {
            return Err(failure());
        }
        self.objects.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        if self.fails() {
            return Err(failure());
        }
        self.objects.get_opts(path, options).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.objects.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        if self.fails() {
            return Box::pin(futures_util::stream::iter([Err(failure())]));
        }
        if self.is_blind {
            return Box::pin(futures_util::stream::empty());
        }
        self.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.objects.copy_opts(from, to, options).await
    }
}

"""Lines that mend what is wrong with weights, by kind and library; the names in them are told in `remedies`."""

from __future__ import annotations

Lines = dict[str, str]
"""The lines by library. pytorch serves those that are missing, and transformers serves trl."""

TOKEN_EXACT: Lines = {
    "pytorch": """
        # one update; where the loss shifts, count b["labels"][:, 1:]
        tokens = sum(int((b["labels"] != -100).sum()) for b in batches)
        for batch in batches:
            (loss_sum(model, batch) / tokens).backward()  # reduction="sum"
        """,
    "ddp": """
        tokens = sum((b["labels"] != -100).sum() for b in batches)  # one update
        dist.all_reduce(tokens)  # of all ranks
        for i, batch in enumerate(batches, 1):
            with model.no_sync() if i < len(batches) else nullcontext():
                loss = loss_sum(model, batch) / tokens.item()  # reduction="sum"
                (loss * dist.get_world_size()).backward()  # DDP averages
        """,
    "accelerate": """
        tokens = sum((b["labels"] != -100).sum() for b in batches)  # one update
        tokens = accelerator.gather(tokens).sum().item()  # of all ranks
        scale = accelerator.num_processes * accelerator.gradient_accumulation_steps
        for i, batch in enumerate(batches, 1):  # DDP and backward() divide by scale
            with accelerator.no_sync(model) if i < len(batches) else nullcontext():
                accelerator.backward(loss_sum(model, batch) * scale / tokens)
        """,
    "fabric": """
        tokens = sum((b["labels"] != -100).sum() for b in batches)  # one update
        tokens = fabric.all_reduce(tokens, reduce_op="sum").item()  # of all ranks
        for i, batch in enumerate(batches, 1):
            with fabric.no_backward_sync(model, enabled=i < len(batches)):
                loss = loss_sum(model, batch) / tokens  # reduction="sum"
                fabric.backward(loss * fabric.world_size)  # DDP averages
        """,
    "lightning": """
        # in training_step: self.tokens += (labels != -100).sum(); return the SUM
        def on_before_optimizer_step(self, optimizer):
            tokens = self.all_gather(self.tokens).sum().item()  # of all ranks
            scale = self.trainer.accumulate_grad_batches * self.trainer.world_size
            for p in (p for p in self.parameters() if p.grad is not None):
                p.grad.mul_(scale / tokens)  # Trainer and DDP divided by scale
            self.tokens = 0  # as in __init__
        """,
    "transformers": """
        def token_loss(outputs, labels, num_items_in_batch=None):
            logits = outputs.logits[:, :-1].flatten(0, 1).float()
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
            return loss / num_items_in_batch  # targets of the whole update

        trainer = Trainer(..., compute_loss_func=token_loss)
        """,
    "trl": """
        # SFTTrainer divides by num_items_in_batch itself: override no compute_loss;
        # or token_loss(outputs, labels, num_items_in_batch) does: a SUM / the last
        args = SFTConfig(..., loss_type="nll", average_tokens_across_devices=True)
        trainer = SFTTrainer(..., args=args, compute_loss_func=token_loss)
        """,
}

SCALE: dict[str, Lines] = {
    "A": {
        "pytorch": """
            (loss / len(batches)).backward()  # the microbatches of this update
            """,
        "accelerate": """
            # backward() divides by it
            accelerator = Accelerator(gradient_accumulation_steps=$A)
            accelerator.backward(loss)
            """,
        "fabric": """
            fabric.backward(loss / len(batches))  # the microbatches of this update
            """,
        "lightning": """
            trainer = Trainer(accumulate_grad_batches=$A)  # divides by it
            # under manual optimization nothing divides:
            self.manual_backward(loss / $A)
            """,
        "transformers": """
            class MyTrainer(Trainer):
                # what compute_loss returns is a mean over one microbatch: divide it.
                # Older versions: self.model_accepts_loss_kwargs = False
                loss_is_scaled_for_ga = False
            """,
    },
    "1/A": {
        "pytorch": """
            # divided by $A twice, here and where the loss is made: keep one
            loss.backward()
            """,
        "accelerate": """
            accelerator.backward(loss)  # not loss / $A: backward() divides itself
            """,
        "fabric": """
            # divided by $A twice, here and where the loss is made: keep one
            fabric.backward(loss)
            """,
        "lightning": """
            return loss  # not loss / $A: Trainer(accumulate_grad_batches=$A) divides
            """,
        "transformers": """
            class MyTrainer(Trainer):
                # what compute_loss returns is divided over the update already.
                # Older versions: self.model_accepts_loss_kwargs = True
                loss_is_scaled_for_ga = True
            """,
    },
    "D": {
        "pytorch": """
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum
                p.grad /= dist.get_world_size()  # an average, of means per rank
            """,
        "ddp": """
            # DDP averages: only what is divided by the count of ALL ranks is
            # multiplied by the world size; a mean of this rank is not
            dist.all_reduce(tokens)
            loss = loss_sum(model, batch) / tokens.item() * dist.get_world_size()
            """,
        "accelerate": """
            # only what is divided by the count of ALL ranks is multiplied
            tokens = accelerator.gather(tokens).sum().item()
            loss = loss_sum(model, batch) / tokens * accelerator.num_processes
            """,
        "fabric": """
            # only what is divided by the count of ALL ranks is multiplied
            tokens = fabric.all_reduce(tokens, reduce_op="sum").item()
            loss = loss_sum(model, batch) / tokens * fabric.world_size
            """,
        "lightning": """
            # only what is divided by the count of ALL ranks is multiplied
            tokens = self.all_gather(tokens).sum().item()
            loss = loss_sum(self, batch) / tokens * self.trainer.world_size
            """,
        "transformers": """
            # super().compute_loss multiplies by the ranks: not once more
            items = num_items_in_batch
            return super().compute_loss(model, inputs, num_items_in_batch=items)
            """,
    },
    "1/D": {
        "pytorch": """
            for p in model.parameters():
                dist.all_reduce(p.grad)  # a sum: the tokens are all ranks'
            """,
        "ddp": """
            # tokens are those of all ranks, and DDP averages over $D of them
            (loss_sum(model, batch) / tokens * dist.get_world_size()).backward()
            """,
        "accelerate": """
            # tokens are those of all ranks, and DDP averages over $D of them
            loss = loss_sum(model, batch) / tokens
            accelerator.backward(loss * accelerator.num_processes)
            """,
        "fabric": """
            # tokens are those of all ranks, and DDP averages over $D of them
            fabric.backward(loss_sum(model, batch) / tokens * fabric.world_size)
            """,
        "lightning": """
            # tokens are those of all ranks, and DDP averages over $D of them
            return loss_sum(self, batch) / tokens * self.trainer.world_size
            """,
        "transformers": """
            # in a compute_loss of your own: num_items_in_batch is that of all ranks,
            # and DDP averages over $D of them
            return loss_sum / num_items_in_batch * self.accelerator.num_processes
            """,
    },
    "A x D": TOKEN_EXACT,
    "1/(A x D)": TOKEN_EXACT,
    "N": TOKEN_EXACT,
    "constant": {
        "pytorch": """
            # every weight is off by $factor. A loss scale? The scaler undoes it:
            scaler.step(optimizer)  # not optimizer.step()
            scaler.update()
            # otherwise look for this constant between the loss and backward()
            """,
        "transformers": """
            # every weight is off by $factor: look for it in compute_loss,
            # compute_loss_func and the loss of the model
            trainer = Trainer(...)  # without compute_loss_func, to compare
            """,
        "accelerate": """
            # every weight is off by $factor. A loss scale? Use the prepared pair:
            model, optimizer = accelerator.prepare(model, optimizer)
            accelerator.backward(loss)
            optimizer.step()  # undoes the scale
            # otherwise look for this constant between the loss and backward()
            """,
        "lightning": """
            # every weight is off by $factor: look for it in training_step.
            # Manual optimization: Lightning's own optimizer undoes a loss scale
            self.manual_backward(loss)
            self.optimizers().step()
            """,
        "fabric": """
            # every weight is off by $factor. A loss scale? Use what setup() returns:
            model, optimizer = fabric.setup(model, optimizer)
            fabric.backward(loss)
            optimizer.step()  # undoes the scale
            # otherwise look for this constant between the loss and backward()
            """,
    },
}
"""The lines for kind scale, by cause."""

WEIGHTS: dict[str, Lines] = {
    "mean-of-means": TOKEN_EXACT,
    "mean-of-replicas": {
        **TOKEN_EXACT,
        "pytorch": """
            tokens = sum((b["labels"] != -100).sum() for b in batches)  # one update
            dist.all_reduce(tokens)  # of all ranks, before the first backward
            for batch in batches:
                (loss_sum(model, batch) / tokens.item()).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)  # the sum, not the average
            """,
        "transformers": """
            args = TrainingArguments(..., average_tokens_across_devices=True)
            # in a compute_loss of your own, since DDP averages:
            return loss_sum / num_items_in_batch * self.accelerator.num_processes
            """,
    },
    "count-mismatch": {
        "pytorch": """
            # count what the loss sums: after its shift, without ignored targets,
            # and nothing for a microbatch that has none
            targets = batch["labels"][:, 1:]
            tokens += int((targets != -100).sum())
            """,
        "transformers": """
            # in the collator: the first position is never a target after the shift,
            # so labels count the same shifted or not
            batch["labels"][:, 0] = -100
            """,
    },
    "term-scale": {
        "pytorch": """
            # each term over its own denominator; a mean over one microbatch is
            # divided by the microbatches of the update
            loss = ce_sum / tokens + coefficient * aux_mean / len(batches)
            loss.backward()
            """,
        "ddp": """
            # DDP averages: only a sum over the count of ALL ranks is multiplied
            ce = ce_sum / tokens * dist.get_world_size()
            (ce + coefficient * aux_mean / len(batches)).backward()
            """,
        "accelerate": """
            # backward() divides every term; only ce_sum / tokens is done already
            scale = accelerator.num_processes * accelerator.gradient_accumulation_steps
            accelerator.backward(ce_sum / tokens * scale + coefficient * aux_mean)
            """,
        "fabric": """
            # DDP averages: only a sum over the count of ALL ranks is multiplied
            ce = ce_sum / tokens * fabric.world_size
            fabric.backward(ce + coefficient * aux_mean / len(batches))
            """,
        "lightning": """
            # the Trainer divides every term; only ce_sum / tokens is done already
            scale = self.trainer.accumulate_grad_batches * self.trainer.world_size
            return ce_sum / tokens * scale + coefficient * aux_mean
            """,
        "transformers": """
            # in a compute_loss of your own (super's multiplies all terms by the ranks)
            ce = ce_sum / num_items_in_batch * self.accelerator.num_processes
            aux = aux_mean / self.current_gradient_accumulation_steps
            return ce + coefficient * aux
            """,
    },
    "partial-group": {
        "pytorch": """
            left = len(loader) % $A  # microbatches of the last group
            last = i >= len(loader) - left
            (loss / (left if last else $A)).backward()
            """,
        "accelerate": """
            left = len(loader) % $A  # microbatches of the last group
            last = i >= len(loader) - left
            # backward() divides by gradient_accumulation_steps, whatever is left
            accelerator.backward(loss * $A / left if last else loss)
            """,
        "fabric": """
            left = len(loader) % $A  # microbatches of the last group
            last = i >= len(loader) - left
            fabric.backward(loss / (left if last else $A))
            """,
        "lightning": """
            # in training_step; the Trainer divides by accumulate_grad_batches,
            # whatever is left
            left = self.trainer.num_training_batches % $A
            last = batch_idx >= self.trainer.num_training_batches - left
            return loss * $A / left if last else loss
            """,
        "transformers": """
            # in a compute_loss that returns a loss scaled for the update:
            return loss / self.current_gradient_accumulation_steps
            """,
    },
    "stale-gradient": {
        "pytorch": """
            optimizer.zero_grad()  # before the first microbatch of EVERY update:
            # after a skipped one, and where an epoch ended within a group
            for batch in batches:
                (loss_sum(model, batch) / tokens).backward()
            optimizer.step()
            """,
        "accelerate": """
            # zero_grad() does nothing within a group; with sync_with_dataloader
            # (the default) the last group of an epoch ends with its loader
            plugin = GradientAccumulationPlugin(num_steps=$A, sync_with_dataloader=True)
            accelerator = Accelerator(gradient_accumulation_plugin=plugin)
            """,
        "fabric": """
            optimizer.zero_grad()  # before the first microbatch of EVERY update:
            # after a skipped one, and where an epoch ended within a group
            for batch in batches:
                fabric.backward(loss_sum(model, batch) / tokens)
            optimizer.step()
            """,
        "lightning": """
            def on_train_epoch_start(self):  # manual optimization
                self.optimizers().zero_grad()
            """,
        "transformers": """
            # the Trainer clears the gradients after each update:
            # run no backward() of your own outside training_step
            trainer.model.zero_grad()
            """,
    },
    "lost-microbatch": {
        "pytorch": """
            if (i + 1) % $A == 0 or i + 1 == len(loader):  # the last group too
                optimizer.step()
                optimizer.zero_grad()  # here and nowhere else
            """,
        "accelerate": """
            for batch in loader:  # the prepared one, which tells its last batch
                with accelerator.accumulate(model):
                    accelerator.backward(compute_loss(model, batch))
                    optimizer.step()  # both run once per update
                    optimizer.zero_grad()
            """,
        "lightning": """
            # manual optimization; zero_grad() here and nowhere else
            if (batch_idx + 1) % $A == 0 or self.trainer.is_last_batch:
                self.optimizers().step()
                self.optimizers().zero_grad()
            """,
        "transformers": """
            # the Trainer clears the gradients after each update: call no zero_grad()
            # in training_step or in a callback's on_substep_end
            args = TrainingArguments(..., gradient_accumulation_steps=$A)
            """,
    },
    "unsynchronised-replicas": {
        "pytorch": """
            for p in model.parameters():  # after the last microbatch, on every rank
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            optimizer.step()
            """,
        "ddp": """
            outputs = model(**batch)  # the DDP wrapper, not model.module
            # the last microbatch of every update outside model.no_sync()
            """,
        "accelerate": """
            model, optimizer = accelerator.prepare(model, optimizer)
            outputs = model(**batch)  # the prepared model, not the unwrapped one
            # the last microbatch of every update outside accelerator.no_sync(model)
            """,
        "fabric": """
            model, optimizer = fabric.setup(model, optimizer)
            outputs = model(**batch)  # what setup returned, not model.module
            # the last microbatch with no_backward_sync(model, enabled=False)
            """,
        "lightning": """
            # gradients are reduced in the backward of training_step: compute the loss
            # there, and run no backward() of your own elsewhere
            self.manual_backward(loss)
            """,
        "transformers": """
            # in a compute_loss of your own: the model that is passed in, not self.model
            outputs = model(**inputs)
            """,
    },
    "duplicate-example": {
        "pytorch": """
            # the same seed on all ranks; drop_last: nothing is repeated to fill up
            sampler = DistributedSampler(dataset, seed=0, drop_last=True)
            loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)
            sampler.set_epoch(epoch)
            """,
        "accelerate": """
            # drop_last: nothing is repeated to fill up the last batches; or keep all:
            # DataLoaderConfiguration(even_batches=False), join_uneven_inputs([model])
            loader = DataLoader(dataset, batch_size, shuffle=True, drop_last=True)
            loader = accelerator.prepare(loader)
            """,
        "fabric": """
            sampler = DistributedSampler(dataset, seed=0, drop_last=True)
            loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)
            loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
            sampler.set_epoch(epoch)
            """,
        "lightning": """
            trainer = Trainer(use_distributed_sampler=False)
            # in train_dataloader(); the Trainer calls set_epoch
            sampler = DistributedSampler(dataset, seed=0, drop_last=True)
            return DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)
            """,
        "transformers": """
            args = TrainingArguments(..., dataloader_drop_last=True)
            """,
    },
    "uneven-weights": TOKEN_EXACT,
}
